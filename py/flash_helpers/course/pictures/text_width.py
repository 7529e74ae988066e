"""How wide a text is: an estimate that no common sans-serif font exceeds.

A picture names the reader's own sans-serif font, so that its exact width is not known. DejaVu Sans
is among the widest of those that systems have (Verdana's width; Arial, Roboto and Segoe UI are
about an eighth narrower): what fits with its advance widths fits with the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Advance widths of DejaVu Sans 2.37, in thousandths of the font's size, and the characters that
# have them; SP stands for both spaces.
_REGULAR = (
    "275:' 278:ijl 295:IJ 318:,.· 318:SP 337:/:;\\| 352:f 361:- 390:()[] 392:t 401:!²³ 411:r "
    '460:" 500:*_`\u2013 521:s 525:z 531:? 550:c 557:L 575:F 579:k 592:vxy 603:P 611:TY 612:o '
    "613:a 615:e 632:E 634:hnu 635:Sbdgpq 636:$0123456789{}µ 637:√ 656:K 684:AV 685:XZ 686:B "
    "695:R 698:C 732:U 748:N 752:H 770:D 775:G 780:& 787:OQ 818:w 833:∞ "
    "838:#+<=>^~\u00d7\u2212→←↑↓≤≥≠⊕≈ 863:M 950:% 969:½ 974:m 989:W 1000:@\u2014…"
)
_BOLD = (
    "306:' 343:ijl 348:SP 365:/\\| 372:IJ 380:,.· 400::; 415:- 435:f 438:²³ 456:! 457:()[] 478:t "
    '493:r 500:_`\u2013 521:" 523:* 580:? 582:z 593:c 595:s 637:L 645:x 652:vy 665:k 667:√ 675:a '
    "678:e 682:T 683:EF 687:o 696:$0123456789 712:hnu{} 716:bdgpq 720:S 724:Y 725:Z 733:P 734:C "
    "736:µ 762:B 770:R 771:X 774:AV 775:K 812:U 821:G 830:D 833:∞ 837:HN "
    "838:#+<=>^~\u00d7\u2212→←↑↓≤≥≠⊕≈ 850:OQ 872:& 924:w 995:M 1000:@\u2014… 1002:% 1035:½ 1042:m "
    "1103:W"
)


def _by_character(table: str) -> Mapping[str, int]:
    pairs = (part.split(":", 1) for part in table.split(" "))
    return MappingProxyType(
        {c: int(width) for width, text in pairs for c in ("\xa0 " if text == "SP" else text)}
    )


WIDTHS = _by_character(_REGULAR)
BOLD_WIDTHS = _by_character(_BOLD)
ASCENT, DESCENT = 0.76, 0.24  # of the font's size: letters and digits reach no further


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Width of a line of text in the unit of `size`, the font's size.

    Raises ValueError for a character of which no width is known.
    """
    widths = BOLD_WIDTHS if bold else WIDTHS
    if unknown := sorted(set(text) - set(widths)):
        raise ValueError(f"{text!r}: the width of {', '.join(unknown)} is not known: add it")
    return size * sum(widths[c] for c in text) / 1000
