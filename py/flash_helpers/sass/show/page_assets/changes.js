// ---- changes, the main loop, search ------------------------------------------------------------

function setActive(name) {
  active = name;
  PANES.forEach((other) => pane[other].root.classList.toggle("active", other === name));
  showChange();
}

// Put the cursor on a row, light what it is linked with, and bring all of that into view.
function visit(name, element) {
  if (pinned) unpin();
  setActive(name);
  setCursor(name, element);
  scrollTo(name, element);
  revealLinks(name);
}

function scrollTo(name, element) {
  const { code } = pane[name];
  code.scrollTop = element.dataset.n * ROW - code.clientHeight / 4;
  scrollSideways(code, element);
}

// Where a row is indented beyond what can be seen of it, to its first character.
function scrollSideways(code, element) {
  const cell = element.querySelector(":scope > span:last-child"); // none side by side
  const text = cell && document.createTreeWalker(cell, NodeFilter.SHOW_TEXT).nextNode();
  if (!text) return;
  const range = document.createRange();
  range.selectNodeContents(cell);
  range.setStart(text, text.data.match(/^\s*/)[0].length);
  const { left, width } = range.getBoundingClientRect();
  const from = left - code.getBoundingClientRect().left;
  const wanted = Math.min(width, code.clientWidth / 3);
  if (from >= 0 && from + wanted <= code.clientWidth) return;
  const start = from + code.scrollLeft;
  code.scrollLeft = start + wanted <= code.clientWidth ? 0 : start - 2 * ROW;
}

const place = (element) => (element ? Number(element.dataset.n) : -1);

function nextChange(by) {
  const { hunks, cursor } = pane[active];
  const at = place(cursor);
  const found = by > 0 ? hunks.find(({ row }) => place(row) > at)
    : hunks.filter(({ row }) => place(row) < at).pop();
  if (found) visit(active, found.row);
}

function showChange() {
  const { hunks, cursor } = pane[active];
  const n = hunks.filter(({ row }) => place(row) <= place(cursor)).length;
  byId("change").textContent = hunks.length ? `change ${n} of ${hunks.length}` : "no change";
}

// Each pane at its first change, CUDA at the first that is more than a comment; else at its start.
function showFirstChanges(names = PANES) {
  for (const name of names) {
    const { hunks, code } = pane[name];
    const first = (hunks.find(({ isCode }) => isCode) || hunks[0])?.row;
    if (first) {
      placeCursor(name, first);
      scrollTo(name, first);
    } else code.scrollTop = 0;
  }
  showChange();
}

function toMainLoop() {
  ensure(["ptx", "sass"], goToMainLoop);
}

function goToMainLoop() {
  const block = kernel.blocks.find(({ phase }) => phase === "main loop");
  if (!block) return;
  const { rows } = pane.sass;
  for (let i = block.start; i < kernel.sass.text.length; i++) { // the filter may hide the first
    if (!rows.has(String(i))) continue;
    const shown = active;
    visit("sass", rows.get(String(i)));
    const ptx = pane.ptx.rows.get(String(kernel.ptx.line[kernel.ptx.loop]));
    if (ptx) scrollTo("ptx", ptx);
    setActive(shown);
    return;
  }
}

function findHits(name) {
  const wanted = byId("search").value.trim().toLowerCase();
  const own = pane[name];
  own.hits.forEach((row) => row.classList.remove("hit"));
  own.hits = wanted ? own.texts.filter(([, text]) => text.includes(wanted)).map(([row]) => row) : [];
  own.hits.forEach((row) => row.classList.add("hit"));
  showHits();
}

function showHits() {
  const total = PANES.reduce((sum, name) => sum + pane[name].hits.length, 0);
  const n = pane[active].hits.indexOf(pane[active].cursor) + 1;
  byId("hits").textContent = !byId("search").value.trim() ? ""
    : n ? `${n} of ${pane[active].hits.length}` : total ? `${total} lines` : "none";
}

// The next line that holds what is searched: in the pane used last, or else in the first with one.
function nextHit(by) {
  const name = [active, ...PANES].find((other) => pane[other].hits.length);
  if (!name) return;
  const { hits, cursor } = pane[name];
  const at = place(cursor);
  const found = by > 0 ? hits.find((row) => place(row) > at) || hits[0]
    : hits.filter((row) => place(row) < at).pop() || hits[hits.length - 1];
  if (name !== active) showTab(name);
  visit(name, found);
  showHits();
}

function setSplit(wanted) {
  split = wanted && Boolean(parent);
  document.body.classList.toggle("split", split);
  document.querySelector('[data-do="split"]').setAttribute("aria-pressed", String(split));
  setSingle();
}

function turnSplit() {
  const kept = pane[active].cursor?.dataset.key;
  setSplit(!split);
  renderAll();
  ensure(seen());
  showTab(active);
  const row = pane[active].rows.get(kept);
  if (row) scrollTo(active, row);
}

const narrow = matchMedia("(max-width: 900px)");
function setSingle() {
  document.body.classList.toggle("single", split || narrow.matches);
  drawRulers();
}

const DO = {
  next: () => nextChange(1), previous: () => nextChange(-1), loop: toMainLoop,
  split: turnSplit,
};
