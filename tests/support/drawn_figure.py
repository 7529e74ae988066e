"""What lies on what in a figure of matplotlib."""

import itertools
from typing import Any


def collisions(figure: Any) -> list[str]:
    """The texts of a figure that a line or curve goes through, and the pairs that overlap."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    FigureCanvasAgg(figure).draw()  # lays it out
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    lines = _lines(figure)
    struck = [name for name, box in boxes if any(_crosses(line, box) for line in lines)]
    pairs = itertools.combinations(boxes, 2)
    return struck + [f"{a} and {b}" for (a, of_a), (b, of_b) in pairs if of_a.overlaps(of_b)]


def _lines(figure: Any) -> list[tuple[Any, Any]]:
    """The path in pixels of each line, curve and edge, and the box that it is drawn in."""
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D
    from matplotlib.patches import StepPatch

    found = []
    for artist in figure.findobj(lambda a: isinstance(a, (Line2D, StepPatch, LineCollection))):
        is_collection = isinstance(artist, LineCollection)
        paths = artist.get_paths() if is_collection else [artist.get_path()]
        window = artist.get_clip_box() if artist.get_clip_on() else None
        if artist.get_visible():
            to_pixels = artist.get_transform().transform_path
            # a path of one point is a tick
            drawn = [to_pixels(path) for path in paths if len(path) > 1]
            found += [(path, window or figure.bbox) for path in drawn]
    return found


def _crosses(line: tuple[Any, Any], box: Any) -> bool:
    path, window = line
    seen = box.intersection(box, window)
    return seen is not None and path.intersects_bbox(seen, filled=False)
