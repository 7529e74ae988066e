"use strict";
// Three panes of lines that were made of one another, each a diff against the kernel before. The
// data of a kernel is parsed when it is first shown; every row has the same height, so that a place
// in a pane follows from its number.
//
// The key of a line names it in its pane: "file:line" of CUDA, a line of PTX, the number of an
// instruction; those of the kernel before begin with "-". A row has the keys of both its lines.

const ROW = 19;
const CONTEXT = 3; // lines around changes that are shown alone
const PANES = ["cuda", "ptx", "sass"];
const CLASS = { "+": "added", "-": "removed", "~": "changed", ">": "moved", "}": "moved", "<": "moved", "≈": "renamed" };
const isNews = (mark) => mark !== " " && mark !== "≈";
const index = JSON.parse(document.getElementById("index").textContent);
const byId = (id) => document.getElementById(id);
const pane = Object.fromEntries(PANES.map((name) => {
  const root = document.querySelector(`[data-pane="${name}"]`);
  return [name, {
    name, root,
    code: root.querySelector(".code"),
    ruler: root.querySelector(".ruler"),
    found: root.querySelector(".found"),
    note: root.querySelector(".note"),
    rows: new Map(), // key of a line to its row
    pairs: new Map(), // key of a line to the row of the diff that it stands in
    hunks: [], // first rows of what changed
    hits: [], // rows that hold what is searched
    cursor: null,
  }];
}));
const loaded = new Map();
let kernel = null; // what is shown
let parent = null; // the kernel before it, null if it is shown alone
let diff = null; // runs of the rows of each pane, null if it is shown alone
let file = null; // index into kernel.files; with "-" into parent.files
let active = "sass"; // the pane used last
let split = false; // one language, the kernels side by side
let filter = ""; // "", "changes", "group:..." or "opcode:..."
let pinned = null; // {pane, key}
let links = emptyLinks();

const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const hex = (address) => address.toString(16).padStart(4, "0");
const isOld = (key) => key.startsWith("-");
const bare = (key) => key.replace(/^-/, "");
const dataOf = (key) => (isOld(key) ? parent : kernel);
const fileOf = (key) => key.split(":")[0];
const pathOf = (number) => dataOf(number).files[bare(number)];

// ---- data ------------------------------------------------------------------------------------

const parsed = (id) => JSON.parse(byId(id)?.textContent ?? "null");

function load(number) {
  if (!loaded.has(number)) {
    const found = parsed(`kernel-${number}`);
    found.number = number;
    found.sassOfPtx = new Map();
    found.ptx.line.forEach((line) => found.sassOfPtx.set(line, []));
    found.sass.ptx.forEach((line, i) => {
      if (found.sassOfPtx.has(line)) found.sassOfPtx.get(line).push(i);
    });
    found.startsAt = new Map(found.blocks.map((block, b) => [block.start, b]));
    found.loopFrom = new Map(found.loops.map((loop) => [loop.first, loop]));
    found.loopTo = new Set(found.loops.map((loop) => loop.last));
    found.ptxAt = new Map(found.ptx.line.map((line, i) => [line, i]));
    found.sassOfLine = new Map(); // "file:line" to instructions, whether inlined there or not
    found.ptxOfLine = new Map();
    const enter = (map, chain, value) => {
      for (const key of new Set(chain)) {
        if (!map.has(key)) map.set(key, []);
        map.get(key).push(value);
      }
    };
    found.chain = found.chains.map((flat) => {
      const keys = [];
      for (let i = 0; i < flat.length; i += 2) keys.push(`${flat[i]}:${flat[i + 1]}`);
      return keys;
    });
    found.sass.chain.forEach((c, i) => enter(found.sassOfLine, found.chain[c], i));
    found.ptx.line.forEach((line, i) => enter(found.ptxOfLine, ptxChain(found, i), line));
    loaded.set(number, found);
  }
  return loaded.get(number);
}

// The CUDA lines of a PTX line: as its .loc tells, else as the SASS made of it tells.
function ptxChain(data, i) {
  if (data.ptx.chain[i] >= 0) return data.chain[data.ptx.chain[i]];
  const of = data.sassOfPtx.get(data.ptx.line[i]);
  return of.length ? data.chain[data.sass.chain[of[0]]] : [];
}

// ---- links -----------------------------------------------------------------------------------

function emptyLinks() {
  return Object.fromEntries(PANES.map((name) => [name, { lit: new Set(), near: new Set() }]));
}

function linksOf(name, key) {
  const found = emptyLinks();
  const data = dataOf(key);
  const sign = isOld(key) ? "-" : "";
  const at = bare(key);
  const add = (other, kind, k) => found[other][kind].add(`${sign}${k}`);
  const chain = (keys) => keys.forEach((k, depth) => add("cuda", depth ? "near" : "lit", k));
  add(name, "lit", at);
  if (name === "sass") {
    const line = data.sass.ptx[at];
    if (data.ptxAt.has(line)) {
      add("ptx", "lit", line);
      data.sassOfPtx.get(line).forEach((i) => i !== Number(at) && add("sass", "near", i));
    }
    chain(data.chain[data.sass.chain[at]]);
  } else if (name === "ptx") {
    data.sassOfPtx.get(Number(at)).forEach((i) => add("sass", "lit", i));
    chain(ptxChain(data, data.ptxAt.get(Number(at))));
  } else {
    (data.sassOfLine.get(at) || []).forEach((i) => {
      add("sass", "lit", i);
      data.chain[data.sass.chain[i]].forEach((k) => k !== at && add("cuda", "near", k));
    });
    (data.ptxOfLine.get(at) || []).forEach((line) => add("ptx", "lit", line));
  }
  return found;
}

function light(found) {
  for (const name of PANES) {
    const { rows } = pane[name];
    for (const kind of ["near", "lit"]) {
      links[name][kind].forEach((key) => rows.get(key)?.classList.remove(kind));
    }
    for (const kind of ["near", "lit"]) {
      found[name][kind].forEach((key) => rows.get(key)?.classList.add(kind));
    }
  }
  links = found;
  drawRulers();
  showCounts();
}

function showCounts() {
  for (const name of PANES) {
    const number = links[name].lit.size;
    const text = number ? `${number} lit` : "";
    pane[name].found.textContent = text;
    const tab = byId("tabs").querySelector(`[data-tab="${name}"] .found`);
    if (tab) tab.textContent = number || "";
  }
}

let rulersDue = false;
function drawRulers() {
  if (rulersDue) return;
  rulersDue = true;
  requestAnimationFrame(() => {
    rulersDue = false;
    PANES.forEach(drawRuler);
  });
}

function drawRuler(name) {
  const { code, ruler, rows, changes } = pane[name];
  const height = ruler.clientHeight;
  ruler.width = 9;
  ruler.height = height;
  const total = Math.max(code.scrollHeight, 1);
  const context = ruler.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const draw = (n, colour, left, width) => {
    context.fillStyle = style.getPropertyValue(colour);
    context.fillRect(left, (n * ROW / total) * height, width, 2);
  };
  changes?.forEach(([n, mark]) => draw(n, `--${CLASS[mark]}`, 0, 4));
  for (const [kind, colour] of [["near", "--line"], ["lit", "--pin"]]) {
    links[name][kind].forEach((key) => rows.has(key) && draw(rows.get(key).dataset.n, colour, 4, 5));
  }
}

function point(name, key) {
  if (!pinned) light(linksOf(name, key));
  describe(name, key);
}

function pin(name, key) {
  if (pinned && pinned.pane === name && pinned.key === key) {
    unpin();
    return;
  }
  light(linksOf(name, key));
  pinned = { pane: name, key };
  document.body.classList.add("pinned");
  describe(name, key);
  revealLinks(name);
  remember(`#${encodeURIComponent(index.kernels[kernel.number].name)}/${name}/${key}`);
}

// Bring what is lit into view in the other panes.
function revealLinks(name) {
  if (name !== "cuda") showLinkedFile();
  PANES.filter((other) => other !== name).forEach((other) => reveal(other, nearestLit(other)));
}

// The file that is shown stays if it has a linked line, be it that of a call that was inlined.
function showLinkedFile() {
  const keys = [...links.cuda.lit, ...links.cuda.near];
  if (keys.length && !keys.some((key) => pane.cuda.rows.has(key))) showFile(shownWith(fileOf(keys[0])));
}

// The file of a pane that shows the lines of another one too: that of the kernel for its parent's.
function shownWith(number) {
  if (!isOld(number)) return number;
  if (Number(bare(number)) === parent.main && diff.cuda) return String(kernel.main);
  const same = kernel.files.indexOf(pathOf(number));
  return same >= 0 ? String(same) : number;
}

function unpin() {
  pinned = null;
  document.body.classList.remove("pinned");
  light(emptyLinks());
  remember("#");
}

// In the address, so that it can be shared; a page inside another one may have no address.
function remember(place) {
  try { history.replaceState(null, "", place); } catch { /* nothing to remember it in */ }
}

// Of the lit rows, or else of those near to them, the one that is closest to what can be seen.
function nearestLit(name) {
  const { code, rows } = pane[name];
  const middle = (code.scrollTop + code.clientHeight / 2) / ROW;
  let best = null;
  for (const kind of ["lit", "near"]) {
    links[name][kind].forEach((key) => {
      const row = rows.get(key);
      const away = row ? Math.abs(row.dataset.n - middle) : Infinity;
      if (row && (!best || away < best.away)) best = { row, away };
    });
    if (best) break;
  }
  return best?.row;
}

function reveal(name, row) {
  if (!row) return;
  const { code } = pane[name];
  const top = row.dataset.n * ROW;
  const margin = Math.min(3 * ROW, code.clientHeight / 4);
  if (top < code.scrollTop + margin || top > code.scrollTop + code.clientHeight - margin - ROW) {
    code.scrollTop = top - code.clientHeight / 3;
  }
}

// ---- rows ------------------------------------------------------------------------------------

const number = (n) => `<span class="number">${n}</span>`;
const made = (n) => `<span class="made">${n || ""}</span>`;

// Of each language: how many lines a kernel has, the key of one, its text, and what a row shows.
const LANGUAGE = {
  cuda: {
    key: (i, old) => `${old ? fileBefore() : file}:${i + 1}`,
    text: (data, i, old) => textOf(old ? fileBefore() : file)[i],
    cells(data, i, old) {
      const line = this.text(data, i, old);
      const at = line.indexOf("//");
      const code = at < 0 ? escaped(line)
        : `${escaped(line.slice(0, at))}<span class="comment">${escaped(line.slice(at))}</span>`;
      const count = (data.sassOfLine.get(bare(this.key(i, old))) || []).length;
      return { html: `${number(i + 1)}${made(count)}<span>${code}</span>` };
    },
  },
  ptx: {
    key: (i, old) => (old ? `-${parent.ptx.line[i]}` : String(kernel.ptx.line[i])),
    text: (data, i) => data.ptx.text[i],
    cells(data, i) {
      const line = data.ptx.line[i];
      const count = data.sassOfPtx.get(line).length;
      const text = escaped(data.ptx.text[i]);
      const word = text.replace(/^(@!?%\w+ )?([\w.:]+)/, (all, guard, opcode) =>
        `<span class="guard">${guard || ""}</span><span class="word">${opcode}</span>`);
      const gone = !count && data.ptx.isInstruction[i] ? "gone" : "";
      return { html: `${number(line)}${made(count)}<span>${gone ? text : word}</span>`, classes: gone };
    },
  },
  sass: {
    key: (i, old) => `${old ? "-" : ""}${i}`,
    text: (data, i) => data.sass.text[i].replace(/\t/g, " ").trim(),
    cells: sassCells,
    header(data, i) {
      if (!data.startsAt.has(i)) return "";
      const b = data.startsAt.get(i);
      const block = data.blocks[b];
      const loop = data.loopFrom.get(i);
      const from = block.from.length ? ` from ${block.from.join(", ")}` : "";
      const to = block.to.length ? ` to ${block.to.join(", ")}` : "";
      return `<span class="mark"></span><span class="gutter"></span><b>block ${b}</b>` +
        `<span>${escaped(block.phase)}${loop ? `, loop of ${loop.length} instructions` : ""};${from}${to}</span>`;
    },
  },
};

const textOf = (number) => index.sources[pathOf(number)]?.split("\n") ?? [];

// The file of the kernel before that stands beside the shown one.
function fileBefore() {
  if (isOld(file)) return file;
  if (!parent) return null;
  if (Number(file) === kernel.main && diff.cuda) return `-${parent.main}`;
  const same = parent.files.indexOf(pathOf(file));
  return same >= 0 ? `-${same}` : null;
}

// The rows of a pane's diff: [mark, index before, index after], -1 on a side that has no line.
function pairsOf(name) {
  if (name === "cuda") {
    if (!isOld(file) && Number(file) === kernel.main && diff?.cuda) return expanded(diff.cuda);
    return textOf(file).map((_, i) => [" ", fileBefore() ? i : -1, isOld(file) ? -1 : i]);
  }
  if (diff?.[name]) return expanded(diff[name]);
  return kernel[name].text.map((_, i) => [" ", -1, i]);
}

function expanded(runs) {
  const found = [];
  for (const [mark, before, after, length] of runs) {
    for (let k = 0; k < length; k++) {
      found.push([mark, before < 0 ? -1 : before + k, after < 0 ? -1 : after + k]);
    }
  }
  return found;
}

// What a row shows: cells of [index, whether before]; was: it shows what its line was before.
function rowsOf(name) {
  const found = [];
  for (const pair of pairsOf(name)) {
    const [mark, before, after] = pair;
    const arrived = mark === ">" || mark === "}";
    const old = before >= 0 ? [[before, true]] : [];
    const own = after >= 0 ? [[after, false]] : [];
    if (split && parent) {
      found.push({ mark, pair, cells: [arrived ? null : old[0], own[0]] });
    } else if (mark === "~" || mark === "}") {
      found.push({ mark, pair, cells: old, was: true }, { mark, pair, cells: own });
    } else if (mark !== "<") {
      found.push({ mark, pair, cells: own.length ? own : old, also: own.length ? old : [] });
    }
  }
  return found;
}

// ---- the filter --------------------------------------------------------------------------------

const opcodeOf = (data, i) => data.sass.text[i].split("\t")[1].split(".")[0];
const groupOf = (data, i) => data.groups[data.sass.group[i]];

// Of each pane, the indices or keys of a kernel's lines that the filter lets pass.
function passing(data) {
  const [kind, value] = filter.split(/:(.*)/);
  const of = kind === "group" ? groupOf : opcodeOf;
  const found = { cuda: new Set(), ptx: new Set(), sass: new Set() };
  data.sass.text.forEach((_, i) => {
    if (of(data, i) !== value) return;
    found.sass.add(i);
    if (data.ptxAt.has(data.sass.ptx[i])) found.ptx.add(data.ptxAt.get(data.sass.ptx[i]));
    data.chain[data.sass.chain[i]].forEach((key) => found.cuda.add(key));
  });
  return found;
}

// Which rows of a pane are shown; of CUDA the others are pale, since code in pieces says nothing.
function shownRows(name, rows) {
  if (!filter) return rows.map(() => true);
  const shown = rows.map(() => false);
  if (filter === "changes") {
    rows.forEach(({ mark }, n) => {
      if (isNews(mark)) shown.fill(true, Math.max(0, n - CONTEXT), n + CONTEXT + 1);
    });
    return shown;
  }
  const pass = [passing(kernel), parent && passing(parent)];
  const { key } = LANGUAGE[name];
  return rows.map(({ pair }) => [pair[2], pair[1]].some((i, old) => i >= 0 && pass[old] &&
    pass[old][name].has(name === "cuda" ? bare(key(i, old)) : i)));
}

function showFilter() {
  const counted = (of) => {
    const counts = new Map();
    kernel.sass.text.forEach((_, i) => counts.set(of(kernel, i), (counts.get(of(kernel, i)) || 0) + 1));
    parent?.sass.text.forEach((_, i) => counts.has(of(parent, i)) || counts.set(of(parent, i), 0));
    return [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
  };
  const group = (label, kind, of) => `<optgroup label="${label}">${counted(of).map(([value, count]) =>
    `<option value="${escaped(`${kind}:${value}`)}">${escaped(value)} (${count})</option>`).join("")}</optgroup>`;
  byId("filter").innerHTML = '<option value="">all lines</option>' +
    (parent ? '<option value="changes">changes</option>' : "") +
    group("class", "group", groupOf) + group("opcode", "opcode", opcodeOf);
  byId("filter").value = filter;
  if (byId("filter").selectedIndex < 0) setFilter("");
}

function setFilter(value) {
  filter = value;
  byId("filter").value = value;
  renderAll();
}

// ---- drawing -----------------------------------------------------------------------------------

function render(name) {
  const own = pane[name];
  const { key, text, cells, header } = LANGUAGE[name];
  const kept = own.cursor?.dataset.key;
  const rows = rowsOf(name);
  const shown = shownRows(name, rows);
  const pale = name === "cuda" && filter !== "changes";
  const html = name === "sass" && !split ? [COLUMNS] : [];
  const keys = []; // of each row that has some
  const texts = [];
  own.changes = [];
  own.pairs.clear();
  const starts = [];
  let n = html.length;
  let folded = 0;
  let before = " "; // the mark above
  const fold = () => {
    if (folded) html.push(`<div class="row fold">⋯ ${folded} lines${filter === "changes" ? " alike" : ""}</div>`);
    n += folded ? 1 : 0;
    before = folded ? " " : before;
    folded = 0;
  };
  rows.forEach((row, r) => {
    if (!shown[r] && !pale) { folded++; return; }
    fold();
    const parts = row.cells.map((cell) => cell && {
      key: key(...cell),
      text: text.call(LANGUAGE[name], cell[1] ? parent : kernel, ...cell),
      header: header && !row.was && (split || !cell[1]) ? header(cell[1] ? parent : kernel, cell[0]) : "",
      ...cells.call(LANGUAGE[name], cell[1] ? parent : kernel, ...cell),
    });
    const last = parts.filter(Boolean).pop();
    if (parts.some((part) => part?.header)) {
      html.push(split ? `<div class="row block">${parts.map((part) => `<div class="cell">${part?.header || ""}</div>`).join("")}</div>`
        : `<div class="row block ${last.classes}">${last.header}</div>`);
      n++;
    }
    const kind = CLASS[row.mark] || "";
    const classes = [kind, row.was && "was", !shown[r] && "pale", !split && last.classes].filter(Boolean).join(" ");
    const mark = `<span class="mark">${row.mark}</span>`;
    html.push(`<div class="row ${classes}" id="${name}-${last.key}" role="option" data-key="${last.key}" data-n="${n}">` +
      (split && parts.length > 1
        ? parts.map((part) => (part ? `<div class="cell ${kind && `m-${kind}`} ${part.classes || ""}" data-key="${part.key}">${mark}${part.html}</div>`
          : '<div class="cell"></div>')).join("")
        : mark + last.html) + "</div>");
    keys.push([...parts.filter(Boolean).map((part) => part.key), ...(row.also || []).map((cell) => key(...cell))]);
    texts.push(parts.map((part) => part?.text ?? "").join("\n").toLowerCase());
    keys[keys.length - 1].forEach((k) => own.pairs.set(k, row.pair));
    if (isNews(row.mark)) {
      own.changes.push([n, row.mark]);
      if (!isNews(before)) starts.push([keys.length - 1, false]);
      starts[starts.length - 1][1] ||= name !== "cuda" || /\w/.test(last.text.replace(/\/\/.*/, ""));
    }
    before = row.mark;
    n++;
  });
  fold();
  own.code.innerHTML = html.length ? `<div class="rows ${name}">${html.join("")}</div>` : emptyText(name);
  const elements = [...own.code.querySelectorAll(".row[data-key]")];
  own.rows.clear();
  elements.forEach((element, r) => keys[r].forEach((k) => own.rows.set(k, element)));
  own.hunks = starts.map(([r, isCode]) => ({ row: elements[r], isCode }));
  own.texts = elements.map((element, r) => [element, texts[r]]);
  own.cursor = null;
  if (own.rows.has(kept)) placeCursor(name, own.rows.get(kept));
  for (const kind of ["near", "lit"]) {
    links[name][kind].forEach((k) => own.rows.get(k)?.classList.add(kind));
  }
  findHits(name);
  drawRulers();
}

function emptyText(name) {
  const why = {
    cuda: kernel.files.length ? `The text of ${escaped(pathOf(file) || "")} is not in this page: it was made ` +
      "where the repository's sources are not at hand, or have changed since the kernel was built."
      : "The cubin has no line table: compile with -lineinfo.",
    ptx: escaped(kernel.ptx.note),
    sass: "",
  }[name];
  return `<p class="empty">${why}</p>`;
}

function renderAll() {
  PANES.forEach(render);
  showChange();
}

function showFile(wanted) {
  file = String(wanted);
  byId("file").value = file;
  pane.cuda.cursor = null;
  render("cuda");
}

const CONTROL = { // of the packed control word
  stall: (c) => c & 15, yields: (c) => c >> 4 & 1, write: (c) => c >> 5 & 7,
  read: (c) => c >> 8 & 7, waits: (c) => c >> 11 & 63,
};
const board = (n) => (n === 7 ? "-" : String(n));
const waitText = (mask) => [0, 1, 2, 3, 4, 5].map((b) => (mask >> b & 1 ? b : "-")).join("");
const COLUMNS = '<div class="row columns"><span class="mark"></span><span class="gutter"></span><span class="at">at</span>' +
  '<span class="stall" title="stall: cycles before the next issue">stl</span>' +
  '<span class="yield" title="yield: the scheduler may turn to another warp">y</span>' +
  '<span class="board" title="scoreboard raised until the result is written">w</span>' +
  '<span class="board" title="scoreboard raised until the operands are read">r</span>' +
  '<span class="waits" title="scoreboards waited for">waits</span>' +
  '<span class="live" title="live registers">live</span><span class="pipe" style="visibility:hidden"></span>' +
  "<span>instruction</span></div>";

function sassCells(data, i, old) {
  const { sass } = data;
  const c = sass.control[i];
  const stall = CONTROL.stall(c);
  const waits = CONTROL.waits(c);
  const live = sass.live[i];
  const kind = index.pipes[sass.pipe[i]];
  const [guard, opcode, operands] = sass.text[i].split("\t");
  const target = sass.target[i];
  const shown = target < 0 ? escaped(operands) : escaped(operands).replace(/0x[0-9a-f]+(?!.*0x)/, (t) =>
    `<span class="target" data-target="${old ? "-" : ""}${target}">${t}</span>`);
  const classes = [sass.loop[i] >= 0 && "in-loop", data.loopFrom.has(i) && "loop-first",
    data.loopTo.has(i) && "loop-last", sass.idle[i] && "filler"].filter(Boolean).join(" ");
  return { classes, html: `<span class="gutter"></span><span class="at">${hex(16 * i)}</span>` +
    `<span class="stall${stall >= 8 ? " long" : ""}">${stall}</span>` +
    `<span class="yield">${CONTROL.yields(c) ? "y" : "-"}</span>` +
    `<span class="board">${board(CONTROL.write(c))}</span><span class="board">${board(CONTROL.read(c))}</span>` +
    `<span class="waits${waits ? " some" : ""}">${waitText(waits)}</span>` +
    `<span class="live">${live < 0 ? "" : `<i style="--w:${(live / 255 * 100).toFixed(1)}%"></i>${live}`}</span>` +
    `<span class="pipe ${kind.colour}${kind.name === "unknown" ? " unknown" : ""}"></span>` +
    `<span>${guard ? `<span class="guard">${escaped(guard)} </span>` : ""}` +
    `<span class="opcode">${escaped(opcode)}</span> ${shown}</span>` };
}

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
function showFirstChanges() {
  for (const name of PANES) {
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

// ---- the line below ----------------------------------------------------------------------------

// The instruction that raised a scoreboard last, looking back through the text, and round the loop.
function raisedBy(data, i, number) {
  const { sass, loops } = data;
  const raises = (j) => CONTROL.write(sass.control[j]) === number || CONTROL.read(sass.control[j]) === number;
  const loop = loops[sass.loop[i]];
  for (let j = i - 1; j >= (loop ? loop.first : 0); j--) if (raises(j)) return j;
  if (loop) {
    for (let j = loop.last; j > i; j--) if (raises(j)) return j;
    for (let j = loop.first - 1; j >= 0; j--) if (raises(j)) return j;
  }
  return -1;
}

function chainText(data, keys) {
  const sign = data === parent ? "-" : "";
  const parts = keys.map((key) => {
    const [number, line] = key.split(":");
    const name = data.files[number].split("/").slice(-1)[0];
    return `<button type="button" data-goto="${sign}${key}">${escaped(name)}:${line}</button>`;
  });
  return parts.length ? `<span class="chain">${parts.join(" inlined at ")}</span>` : "";
}

// What the diff says of a line, and how it read before.
function changeText(name, key) {
  const [mark, before, after] = pane[name].pairs.get(key) || [" "];
  if (mark === " ") return "";
  const was = before >= 0 && after >= 0 && !isOld(key) ? LANGUAGE[name].text(parent, before, true) : "";
  const at = was && name === "sass" ? `${hex(16 * before)} ` : "";
  return `<b class="m">${mark}</b> ${index.marks[mark]}${was ? `; was <code>${at}${escaped(was)}</code>` : ""}`;
}

function describe(name, key) {
  const parts = [];
  const data = dataOf(key);
  const at = bare(key);
  if (parent) parts.push(`<b>${escaped(index.kernels[data.number].name)}</b>`);
  if (name === "sass") {
    const { sass } = data;
    const c = sass.control[at];
    const waits = [0, 1, 2, 3, 4, 5].filter((b) => CONTROL.waits(c) >> b & 1);
    parts.push(`<code>${hex(16 * at)} ${escaped(LANGUAGE.sass.text(data, at))}</code>`);
    parts.push(changeText(name, key));
    const words = [`stalls ${CONTROL.stall(c)} ${CONTROL.stall(c) === 1 ? "cycle" : "cycles"}`];
    waits.forEach((b) => {
      const j = raisedBy(data, Number(at), b);
      words.push(`waits for scoreboard ${b}` +
        (j < 0 ? "" : ` (${hex(16 * j)} ${escaped(sass.text[j].split("\t")[1])})`));
    });
    if (CONTROL.write(c) !== 7) words.push(`raises ${CONTROL.write(c)} until its result is written`);
    if (CONTROL.read(c) !== 7) words.push(`raises ${CONTROL.read(c)} until its operands are read`);
    if (CONTROL.yields(c)) words.push("may yield");
    if (sass.live[at] >= 0) words.push(`${sass.live[at]} registers live`);
    const pipe = index.pipes[sass.pipe[at]];
    const cost = data.costs[sass.cost[at]];
    words.push(`${escaped(groupOf(data, at))}, pipe ${pipe.name}${cost === null ? "" : `, ${cost} cycles of an SM`}`);
    parts.push(words.join("; "));
    parts.push(chainText(data, data.chain[sass.chain[at]]));
  } else if (name === "ptx") {
    const i = data.ptxAt.get(Number(at));
    const count = data.sassOfPtx.get(Number(at)).length;
    parts.push(`<code>${escaped(data.ptx.text[i])}</code>`);
    parts.push(changeText(name, key));
    if (data.ptx.isInstruction[i]) {
      parts.push(count ? `became ${count} SASS ${count === 1 ? "instruction" : "instructions"}`
        : "nothing is left of it, or it was merged into another");
    }
    parts.push(chainText(data, ptxChain(data, i)));
  } else {
    const all = data.sassOfLine.get(at) || [];
    const counts = new Map();
    all.forEach((i) => counts.set(opcodeOf(data, i), (counts.get(opcodeOf(data, i)) || 0) + 1));
    const [number, line] = at.split(":");
    parts.push(`<code>${escaped(data.files[number])}:${line}</code>`);
    parts.push(changeText(name, key));
    const list = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 12);
    parts.push(all.length ? `${all.length} SASS instructions: ${list.map(([o, c]) => `${c} ${o}`).join(", ")}`
      : "no SASS instruction names this line");
  }
  byId("detail").innerHTML = parts.filter(Boolean).join(" &nbsp; ");
}

// ---- what is shown -------------------------------------------------------------------------------

function show(number, keep = true) {
  const path = kernel && keep ? pathOf(file) : null;
  pinned = null;
  document.body.classList.remove("pinned");
  links = emptyLinks();
  kernel = load(number);
  diff = parsed(`diff-${number}`);
  parent = diff && load(number - 1);
  document.body.classList.toggle("no-diff", !diff);
  setSplit(split);
  const about = index.kernels[number];
  document.querySelectorAll("#versions button, #overview .version").forEach((element) => {
    element.setAttribute("aria-current", String(Number(element.dataset.kernel) === number));
  });
  const beside = parent ? ` beside ${index.kernels[parent.number].name}` : "";
  byId("title").textContent = byId("title").title = titled(`${about.name}${beside}`, about);
  showFacts(about);
  const files = [...kernel.files.map((path, i) => [String(i), path]),
    ...(parent?.files || []).map((path, i) => [`-${i}`, path])
      .filter(([number, path]) => !kernel.files.includes(path) && shownWith(number) === number)];
  byId("file").innerHTML = files.map(([value, path]) => `<option value="${value}">${escaped(path)}` +
    `${isOld(value) ? ` (${escaped(index.kernels[parent.number].name)})` : ""}</option>`).join("");
  byId("file").hidden = !files.length;
  const same = kernel.files.indexOf(path);
  file = String(same >= 0 ? same : kernel.main);
  byId("file").value = file;
  pane.ptx.note.textContent = kernel.ptx.note;
  pane.sass.note.textContent = `${kernel.sass.text.length} instructions`;
  showFilter();
  PANES.forEach((name) => { pane[name].cursor = null; });
  renderAll();
  showFirstChanges();
  showCounts();
  byId("detail").textContent = "Point at a line of any pane; click to pin it.";
}

const titled = (name, about) => (about.title ? `${name}: ${about.title}` : name);

function showFacts(about) {
  const factsOf = (of) => new Map(of ? [["symbol", of.symbol], ...of.facts] : []);
  const before = factsOf(parent && index.kernels[parent.number]);
  const after = factsOf(about);
  const cells = (term) => `${parent ? `<td class="before">${escaped(before.get(term) ?? "")}</td>` : ""}` +
    `<td class="after">${escaped(after.get(term) ?? "")}</td>`;
  const head = parent ? `<thead><tr><th></th><th>${escaped(index.kernels[parent.number].name)}</th>` +
    `<th>${escaped(about.name)}</th></tr></thead>` : "";
  document.querySelector("#about h2").textContent = titled(about.name, about);
  document.querySelector("#about .facts").innerHTML = `${head}<tbody>${[...new Set([...after.keys(), ...before.keys()])]
    .map((term) => `<tr><th>${escaped(term)}</th>${cells(term)}</tr>`).join("")}</tbody>`;
}

function step(by) {
  const next = kernel.number + by;
  if (next >= 0 && next < index.kernels.length) show(next);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  drawRulers();
}

function turnTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  setTheme(theme);
  try { localStorage.setItem("theme", theme); } catch { /* a file opened without storage */ }
}

function showTab(name) {
  PANES.forEach((other) => pane[other].root.classList.toggle("shown", other === name));
  byId("tabs").querySelectorAll("button").forEach((button) => {
    button.setAttribute("aria-selected", String(button.dataset.tab === name));
  });
  drawRulers();
  setActive(name);
  const { cursor } = pane[name];
  if (pinned) reveal(name, nearestLit(name));
  else if (cursor) reveal(name, cursor); // what is hidden does not scroll
}

function placeCursor(name, element) {
  const own = pane[name];
  own.cursor?.classList.remove("cursor");
  own.cursor = element;
  element.classList.add("cursor");
  own.code.setAttribute("aria-activedescendant", element.id);
}

function setCursor(name, element, key = element.dataset.key) {
  placeCursor(name, element);
  point(name, key);
  if (name === active) showChange();
}

function moveCursor(name, by) {
  const { code, cursor } = pane[name];
  const all = [...new Set(pane[name].rows.values())];
  if (!all.length) return;
  const top = Math.ceil(code.scrollTop / ROW);
  const at = cursor ? all.indexOf(cursor) + by : Math.max(0, all.findIndex((r) => r.dataset.n >= top));
  const element = all[Math.min(all.length - 1, Math.max(0, at))];
  setCursor(name, element);
  reveal(name, element);
}

function nextLit(name, by) {
  const lit = [...new Set([...links[name].lit].map((key) => pane[name].rows.get(key)).filter(Boolean))];
  lit.sort((a, b) => a.dataset.n - b.dataset.n);
  if (!lit.length) return;
  const at = pane[name].cursor ? Number(pane[name].cursor.dataset.n) : -1;
  const following = by > 0 ? lit.find((r) => r.dataset.n > at) : lit.filter((r) => r.dataset.n < at).pop();
  const element = following || (by > 0 ? lit[0] : lit[lit.length - 1]);
  placeCursor(name, element);
  describe(name, element.dataset.key);
  reveal(name, element);
}

function goTo(key) {
  const wanted = shownWith(fileOf(key));
  if (wanted !== file) showFile(wanted);
  showTab("cuda");
  const target = pane.cuda.rows.get(key);
  if (target) {
    pinned = null;
    pin("cuda", key);
    scrollTo("cuda", target);
  }
}

for (const name of PANES) {
  const { code } = pane[name];
  code.addEventListener("mouseover", (event) => {
    const element = event.target.closest("[data-key]");
    if (element) point(name, element.dataset.key);
  });
  code.addEventListener("mouseleave", () => { if (!pinned) light(emptyLinks()); });
  code.addEventListener("focus", () => setActive(name));
  code.addEventListener("click", (event) => {
    setActive(name);
    const target = event.target.closest(".target");
    const key = target ? target.dataset.target : event.target.closest("[data-key]")?.dataset.key;
    const element = pane[name].rows.get(key);
    if (!element) return;
    setCursor(name, element, key);
    if (target) reveal(name, element);
    pin(name, key);
  });
  code.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(code.clientHeight / ROW) - 2);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9 }[event.key];
    const other = PANES[PANES.indexOf(name) + { ArrowLeft: -1, ArrowRight: 1 }[event.key]];
    if (by) moveCursor(name, by);
    else if (other) { showTab(other); pane[other].code.focus(); }
    else if ((event.key === "Enter" || event.key === " ") && pane[name].cursor) pin(name, pane[name].cursor.dataset.key);
    else if (event.key === "n") nextLit(name, 1);
    else if (event.key === "N") nextLit(name, -1);
    else return;
    event.preventDefault();
  });
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, input, dialog")) return;
  const does = {
    j: DO.next, k: DO.previous, m: DO.loop, s: DO.split, t: turnTheme,
    "/": () => byId("search").focus(), f: () => byId("filter").focus(),
    "[": () => step(-1), "]": () => step(1),
    "?": () => byId("help").showModal(), i: () => byId("about").showModal(),
    Escape: () => pinned && unpin(),
  }[event.key];
  if (!does) return;
  event.preventDefault();
  does();
});
byId("tools").addEventListener("click", (event) => DO[event.target.closest("[data-do]")?.dataset.do]?.());
byId("search").addEventListener("input", () => PANES.forEach(findHits));
byId("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter") nextHit(event.shiftKey ? -1 : 1);
  else if (event.key === "Escape") pane[active].code.focus();
  else return;
  event.preventDefault();
});
byId("filter").addEventListener("change", (event) => {
  setFilter(event.target.value);
  showFirstChanges();
  pane[active].code.focus();
});
document.addEventListener("click", (event) => {
  const version = event.target.closest("[data-kernel]");
  if (version) show(Number(version.dataset.kernel));
  const goto = event.target.closest("[data-goto]");
  if (goto) goTo(goto.dataset.goto);
});
byId("overview")?.addEventListener("keydown", (event) => {
  const version = event.target.closest("[data-kernel]");
  if (version && (event.key === "Enter" || event.key === " ")) {
    show(Number(version.dataset.kernel));
    event.preventDefault();
  }
});
byId("file").addEventListener("change", (event) => showFile(event.target.value));
byId("theme").addEventListener("click", turnTheme);
byId("help-button").addEventListener("click", () => byId("help").showModal());
byId("facts-button").addEventListener("click", () => byId("about").showModal());
window.addEventListener("resize", drawRulers);
narrow.addEventListener("change", setSingle);

if (index.kernels.length > 1) {
  byId("versions").innerHTML = index.kernels.map((k, i) =>
    `<button type="button" data-kernel="${i}" title="${escaped(titled(k.name, k))}">${escaped(k.name)}</button>`).join("");
}
byId("tabs").innerHTML = PANES.map((name) =>
  `<button type="button" role="tab" data-tab="${name}">${name.toUpperCase()}<span class="found"></span></button>`).join("");
byId("tabs").addEventListener("click", (event) => {
  const button = event.target.closest("[data-tab]");
  if (button) showTab(button.dataset.tab);
});
byId("pipes").innerHTML = index.pipes.map((p) =>
  `<span class="key ${p.colour}">${escaped(p.name)}: ${escaped(p.what)}</span>`).join("");

const shownMarks = Object.entries(index.marks);
byId("mark-help").innerHTML = shownMarks.map(([mark, meaning]) =>
  `<dt>${escaped(mark)}</dt><dd>${escaped(meaning)}</dd>`).join("");
byId("marks").innerHTML = ["+", "-", "~", ">", "≈"].map((mark) =>
  `<b style="color:var(--${mark === "≈" ? "soft" : CLASS[mark]})">${mark === ">" ? "&gt;" : mark}</b> ${CLASS[mark]}`).join("");

const media = matchMedia("(prefers-color-scheme: dark)");
let stored = null;
try { stored = localStorage.getItem("theme"); } catch { /* as above */ }
setTheme(stored || (media.matches ? "dark" : "light"));
media.addEventListener("change", (event) => { if (!stored) setTheme(event.matches ? "dark" : "light"); });

// #v9/sass/120 opens the page where somebody pinned it; -120 is a line of the kernel before it.
const [wantedName, wantedPane, wantedKey] = decodeURIComponent(location.hash.slice(1)).split("/");
const wanted = index.kernels.findIndex((k) => k.name === wantedName);
setSingle();
show(wanted >= 0 ? wanted : index.shown, false);
showTab(["sass", "cuda", "ptx"].find((name) => pane[name].hunks.length) || "sass");
if (wanted >= 0 && PANES.includes(wantedPane) && wantedKey && dataOf(wantedKey)) {
  if (wantedPane === "cuda" && pathOf(fileOf(wantedKey))) showFile(shownWith(fileOf(wantedKey)));
  const element = pane[wantedPane].rows.get(wantedKey);
  if (element) {
    showTab(wantedPane);
    pin(wantedPane, wantedKey);
    reveal(wantedPane, element);
  }
}
