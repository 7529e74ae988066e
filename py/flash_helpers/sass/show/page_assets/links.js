"use strict";
// Three panes of lines that were made of one another, each a diff against the kernel before. The
// data of a kernel is parsed when it is first shown, or loaded when a pane of it is first looked at;
// every row has the same height, so that a place in a pane follows from its number.
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
const loaded = new Map(); // number of a kernel to its data, as far as it has arrived
let kernel = null; // what is shown
let parent = null; // the kernel before it, null if it is shown alone
let diff = null; // runs of the rows of each pane, null if it is shown alone
let file = null; // index into kernel.files; with "-" into parent.files
let active = "sass"; // the pane used last: j, k and the search go through it
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

const NOTHING = {
  files: [], main: 0, chains: [], costs: [], groups: [], blocks: [], loops: [],
  sass: { text: [], control: [], live: [], ptx: [], chain: [], loop: [], group: [], pipe: [], cost: [], target: [], idle: [], spill: [] },
  ptx: { line: [], text: [], chain: [], isInstruction: [], loop: -1, note: "" },
};
const parts = new Map(); // file of a pane to what it holds
const scripts = new Map(); // file of a pane to the element that loads it

// Called by the file of a pane.
function viewPart(path, part) {
  parts.set(path, part);
  for (const [name, lines] of Object.entries(part.sources ?? {})) index.sources[name] = lines.join("\n");
}

const fileOfPane = (number, name) => index.kernels[number].panes?.[name];
const shownKernels = (number) => (byId(`diff-${number}`) ? [number - 1, number] : [number]);
const filesOfPane = (number, name) => shownKernels(number).map((n) => fileOfPane(n, name)).filter(Boolean);
const hasArrived = (name) => filesOfPane(kernel.number, name).every((path) => parts.has(path));

// Load the files of these panes of a kernel and of the one before it; then go on, whether or not all
// of them could be read. The CUDA always is among them, since it holds the links of all lines.
function demand(number, names, then) {
  const missing = new Set([...new Set(["cuda", ...names])]
    .flatMap((name) => filesOfPane(number, name)).filter((path) => !parts.has(path)));
  if (!missing.size) then();
  missing.forEach((path) => {
    if (!scripts.has(path)) {
      const script = document.createElement("script");
      script.src = path;
      scripts.set(path, script);
      script.addEventListener("error", () => scripts.delete(path)); // the next demand tries again
      document.head.append(script);
    }
    const arrived = () => {
      missing.delete(path);
      if (!missing.size) then();
    };
    for (const way of ["load", "error"]) scripts.get(path).addEventListener(way, arrived);
  });
}

function partsOf(number) {
  const found = PANES.map((name) => parts.get(fileOfPane(number, name)) ?? {});
  const columns = (name) => Object.assign({}, NOTHING[name], ...found.map((part) => part[name]));
  return Object.assign({}, NOTHING, ...found, { sass: columns("sass"), ptx: columns("ptx") });
}

function load(number) {
  if (!loaded.has(number)) {
    const found = parsed(`kernel-${number}`) ?? partsOf(number);
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
  scrollSideways(code, row);
}
