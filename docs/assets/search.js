"use strict";
// Search without a network: Sphinx finds the pages; from the texts of their sections come the order of
// what it finds, the place that a result opens, and some of the text, with the words looked for. A term
// of the glossary stands before all that Sphinx finds.
// (Sphinx fetches the pages for that, which a page that was opened from a file may not do.)

const AROUND = 110; // characters before and after the first word found
const SEARCHED = new URLSearchParams(location.search).get("q") || "";
const WORDS = SEARCHED.split(/[^\p{L}\p{N}_.]+/u).filter(Boolean)
  .map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
const PATTERN = new RegExp(`(${WORDS.join("|") || "$^"})`, "giu");

const countIn = (text) => (text.match(PATTERN) || []).length;

// As Sphinx scores, and half a point for each time that a page says it.
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score([page, , anchor, , score]) {
    const sections = SEARCH_TEXTS[page] || {};
    const texts = anchor ? [sections[anchor] || ""] : Object.values(sections);
    return score + Math.min(9, 0.5 * texts.reduce((sum, text) => sum + countIn(text), 0));
  },
};

// Title, anchor and first sentence of the term looked for, if it is one: as it is told, or one of many.
const TERM = (() => {
  const terms = new Map(Object.entries(GLOSSARY));
  const asked = SEARCHED.trim().toLowerCase().replace(/\s+/g, " ");
  return [asked, asked.replace(/s$/, ""), asked.replace(/es$/, "")].map((name) => terms.get(name)).find(Boolean);
})();

function excerpt(text) {
  const found = Math.max(0, text.search(PATTERN));
  const start = Math.max(0, found - AROUND);
  const end = Math.min(text.length, found + AROUND);
  const words = text.slice(start, end).replace(start ? /^\S*\s/ : /^/, "").replace(end < text.length ? /\s\S*$/ : /$/, "");
  return (start ? "… " : "") + words + (end < text.length ? " …" : "");
}

// Where a page says it: in the section that the result names, or in the one that says it most.
function place(sections, anchor) {
  const found = Object.entries(sections).sort(([, a], [, b]) => countIn(b) - countIn(a));
  return anchor || !found.length || !countIn(found[0][1]) ? [anchor, sections[anchor] || ""] : found[0];
}

function appendText(item, text) {
  const line = document.createElement("p");
  line.className = "search-excerpt";
  text.split(PATTERN).forEach((part, n) => {
    line.append(n % 2 ? Object.assign(document.createElement("mark"), { textContent: part }) : part);
  });
  item.append(line);
}

function termItem([title, anchor, sentence]) {
  const item = document.createElement("li");
  item.dataset.complete = "yes";
  item.append(Object.assign(document.createElement("a"), { href: `glossary.html#${anchor}`, textContent: `Glossary: ${title}` }));
  appendText(item, sentence);
  return item;
}

function complete(item) {
  const link = item.querySelector("a");
  if (!link || item.dataset.complete) return;
  item.dataset.complete = "yes";
  const [file, name] = link.getAttribute("href").split("#");
  const sections = SEARCH_TEXTS[decodeURIComponent(file.replace(/\.html$/, ""))] || {};
  if (TERM && link.textContent === `Glossary > ${TERM[0]}`) {
    item.remove(); // it stands first
    return;
  }
  const [anchor, text] = place(sections, name ? `#${name}` : "");
  link.setAttribute("href", file + anchor);
  if (text) appendText(item, excerpt(text));
}

function completeAll(results) {
  const list = results.querySelector("ul.search");
  if (!list) return;
  if (TERM && !list.dataset.term) {
    list.dataset.term = "yes";
    list.prepend(termItem(TERM));
  }
  list.querySelectorAll(":scope > li").forEach(complete);
  const summary = results.querySelector(".search-summary");
  const said = "Search finished: the glossary alone has it.";
  if (TERM && list.children.length === 1 && summary.textContent && summary.textContent !== said) summary.textContent = said;
}

{
  const results = document.getElementById("search-results");
  new MutationObserver(() => completeAll(results)).observe(results, { childList: true, subtree: true });
}
