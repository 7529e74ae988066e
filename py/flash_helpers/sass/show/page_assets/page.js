"use strict";
// Three panes of lines that were made of one another. The data of a kernel is parsed when it is
// first shown; every row has the same height, so that a place in a pane follows from its number.

const ROW = 19;
const PANES = ["cuda", "ptx", "sass"];
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
    cursor: null,
  }];
}));
const loaded = new Map();
let kernel = null; // what is shown
let file = null; // index into kernel.files
let pinned = null; // {pane, key}
let links = emptyLinks();

const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const hex = (address) => address.toString(16).padStart(4, "0");

// ---- data ------------------------------------------------------------------------------------

function load(number) {
  if (!loaded.has(number)) {
    const found = JSON.parse(byId(`kernel-${number}`).textContent);
    found.number = number;
    found.sassOfPtx = new Map();
    found.ptx.line.forEach((line) => found.sassOfPtx.set(line, []));
    found.sass.ptx.forEach((line, i) => {
      if (found.sassOfPtx.has(line)) found.sassOfPtx.get(line).push(i);
    });
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
  found[name].lit.add(key);
  const chain = (keys) => {
    if (keys.length) found.cuda.lit.add(keys[0]);
    keys.slice(1).forEach((k) => found.cuda.near.add(k));
  };
  if (name === "sass") {
    const line = kernel.sass.ptx[key];
    if (kernel.ptxAt.has(line)) {
      found.ptx.lit.add(line);
      kernel.sassOfPtx.get(line).forEach((i) => i !== key && found.sass.near.add(i));
    }
    chain(kernel.chain[kernel.sass.chain[key]]);
  } else if (name === "ptx") {
    kernel.sassOfPtx.get(key).forEach((i) => found.sass.lit.add(i));
    chain(ptxChain(kernel, kernel.ptxAt.get(key)));
  } else {
    (kernel.sassOfLine.get(key) || []).forEach((i) => {
      const inner = kernel.chain[kernel.sass.chain[i]];
      found.sass.lit.add(i);
      inner.forEach((k) => k !== key && found.cuda.near.add(k));
    });
    (kernel.ptxOfLine.get(key) || []).forEach((line) => found.ptx.lit.add(line));
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
  const { code, ruler, rows } = pane[name];
  const height = ruler.clientHeight;
  ruler.width = 9;
  ruler.height = height;
  const total = Math.max(code.scrollHeight, 1);
  const context = ruler.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  for (const [kind, colour] of [["near", "--line"], ["lit", "--pin"]]) {
    context.fillStyle = style.getPropertyValue(colour);
    links[name][kind].forEach((key) => {
      const row = rows.get(key);
      if (row) context.fillRect(1, (row.dataset.n * ROW / total) * height, 8, 2);
    });
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
  if (name !== "cuda") showLinkedFile();
  PANES.filter((other) => other !== name).forEach((other) => reveal(other, nearestLit(other)));
  remember(`#${encodeURIComponent(index.kernels[kernel.number].name)}/${name}/${key}`);
}

// The file that is shown stays if it has a linked line, be it that of a call that was inlined.
function showLinkedFile() {
  const inFile = (key) => Number(key.split(":")[0]) === file;
  const keys = [...links.cuda.lit, ...links.cuda.near];
  if (keys.length && !keys.some(inFile)) showFile(Number(keys[0].split(":")[0]));
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

function row(name, key, n, body, classes = "") {
  return `<div class="row ${classes}" id="${name}-${key}" role="option" data-key="${key}" data-n="${n}">${body}</div>`;
}

function fill(name, html) {
  const { code, rows } = pane[name];
  code.innerHTML = html;
  rows.clear();
  code.querySelectorAll(".row[data-key]").forEach((element) => {
    rows.set(name === "cuda" ? element.dataset.key : Number(element.dataset.key), element);
  });
  pane[name].cursor = null;
  for (const kind of ["near", "lit"]) {
    links[name][kind].forEach((key) => rows.get(key)?.classList.add(kind));
  }
  drawRulers();
}

const number = (n) => `<span class="number">${n}</span>`;
const made = (n) => `<span class="made">${n || ""}</span>`;

function showFile(wanted) {
  file = wanted;
  const path = kernel.files[file];
  const text = index.sources[path];
  byId("file").value = String(file);
  if (text === undefined) {
    fill("cuda", `<p class="empty">The text of ${escaped(path)} is not in this page: it was made ` +
      "where the repository's sources are not at hand, or have changed since the kernel was built.</p>");
    return;
  }
  const body = text.split("\n").map((line, i) => {
    const key = `${file}:${i + 1}`;
    const count = (kernel.sassOfLine.get(key) || []).length;
    const at = line.indexOf("//");
    const code = at < 0 ? escaped(line)
      : `${escaped(line.slice(0, at))}<span class="comment">${escaped(line.slice(at))}</span>`;
    return row("cuda", key, i, number(i + 1) + made(count) + `<span>${code}</span>`);
  });
  fill("cuda", `<div class="rows">${body.join("")}</div>`);
}

function showPtx() {
  const { ptx } = kernel;
  const body = ptx.line.map((line, i) => {
    const count = kernel.sassOfPtx.get(line).length;
    const text = escaped(ptx.text[i]);
    const word = text.replace(/^(@!?%\w+ )?([\w.:]+)/, (all, guard, opcode) =>
      `<span class="guard">${guard || ""}</span><span class="word">${opcode}</span>`);
    const gone = !count && ptx.isInstruction[i] ? "gone" : "";
    return row("ptx", line, i, number(line) + made(count) + `<span>${gone ? text : word}</span>`, gone);
  });
  pane.ptx.note.textContent = ptx.note;
  fill("ptx", ptx.line.length ? `<div class="rows">${body.join("")}</div>`
    : `<p class="empty">${escaped(ptx.note)}</p>`);
}

const CONTROL = { // of the packed control word
  stall: (c) => c & 15, yields: (c) => c >> 4 & 1, write: (c) => c >> 5 & 7,
  read: (c) => c >> 8 & 7, waits: (c) => c >> 11 & 63,
};
const board = (n) => (n === 7 ? "-" : String(n));
const waitText = (mask) => [0, 1, 2, 3, 4, 5].map((b) => (mask >> b & 1 ? b : "-")).join("");

function showSass() {
  const { sass, blocks, loops } = kernel;
  const startsAt = new Map(blocks.map((block, b) => [block.start, b]));
  const first = new Map(loops.map((loop) => [loop.first, loop]));
  const last = new Map(loops.map((loop) => [loop.last, loop]));
  const html = [
    '<div class="row columns"><span class="gutter"></span><span class="at">at</span>' +
    '<span class="stall" title="stall: cycles before the next issue">stl</span>' +
    '<span class="yield" title="yield: the scheduler may turn to another warp">y</span>' +
    '<span class="board" title="scoreboard raised until the result is written">w</span>' +
    '<span class="board" title="scoreboard raised until the operands are read">r</span>' +
    '<span class="waits" title="scoreboards waited for">waits</span>' +
    '<span class="live" title="live registers">live</span><span class="pipe" style="visibility:hidden"></span>' +
    "<span>instruction</span></div>",
  ];
  let n = 1;
  for (let i = 0; i < sass.text.length; i++) {
    const inLoop = sass.loop[i] >= 0;
    if (startsAt.has(i)) {
      const block = blocks[startsAt.get(i)];
      const from = block.from.length ? ` from ${block.from.join(", ")}` : "";
      const to = block.to.length ? ` to ${block.to.join(", ")}` : "";
      const classes = `block${inLoop ? " in-loop" : ""}${first.has(i) ? " loop-first" : ""}`;
      html.push(`<div class="row ${classes}"><span class="gutter"></span><b>block ${startsAt.get(i)}</b>` +
        `<span>${escaped(block.phase)}${first.has(i) ? `, loop of ${first.get(i).length} instructions` : ""}` +
        `;${from}${to}</span></div>`);
      n++;
    }
    const c = sass.control[i];
    const stall = CONTROL.stall(c);
    const waits = CONTROL.waits(c);
    const live = sass.live[i];
    const kind = index.pipes[sass.pipe[i]];
    const [guard, opcode, operands] = sass.text[i].split("\t");
    const target = sass.target[i];
    const shown = target >= 0 && sass.target[i] < sass.text.length
      ? escaped(operands).replace(/0x[0-9a-f]+(?!.*0x)/, (t) => `<span class="target" data-target="${target}">${t}</span>`)
      : escaped(operands);
    const classes = (inLoop ? "in-loop" : "") + (last.has(i) ? " loop-last" : "") +
      (sass.idle[i] ? " filler" : "");
    html.push(row("sass", i, n++,
      `<span class="gutter"></span><span class="at">${hex(16 * i)}</span>` +
      `<span class="stall${stall >= 8 ? " long" : ""}">${stall}</span>` +
      `<span class="yield">${CONTROL.yields(c) ? "y" : "-"}</span>` +
      `<span class="board">${board(CONTROL.write(c))}</span><span class="board">${board(CONTROL.read(c))}</span>` +
      `<span class="waits${waits ? " some" : ""}">${waitText(waits)}</span>` +
      `<span class="live">${live < 0 ? "" : `<i style="--w:${(live / 255 * 100).toFixed(1)}%"></i>${live}`}</span>` +
      `<span class="pipe ${kind.colour}${kind.name === "unknown" ? " unknown" : ""}"></span>` +
      `<span>${guard ? `<span class="guard">${escaped(guard)} </span>` : ""}` +
      `<span class="opcode">${escaped(opcode)}</span> ${shown}</span>`, classes));
  }
  pane.sass.note.textContent = `${sass.text.length} instructions`;
  fill("sass", `<div class="rows sass">${html.join("")}</div>`);
}

// ---- the line below ----------------------------------------------------------------------------

// The instruction that raised a scoreboard last, looking back through the text, and round the loop.
function raisedBy(i, number) {
  const { sass, loops } = kernel;
  const raises = (j) => CONTROL.write(sass.control[j]) === number || CONTROL.read(sass.control[j]) === number;
  const loop = loops[sass.loop[i]];
  for (let j = i - 1; j >= (loop ? loop.first : 0); j--) if (raises(j)) return j;
  if (loop) {
    for (let j = loop.last; j > i; j--) if (raises(j)) return j;
    for (let j = loop.first - 1; j >= 0; j--) if (raises(j)) return j;
  }
  return -1;
}

function chainText(keys) {
  const parts = keys.map((key) => {
    const [number, line] = key.split(":");
    const name = kernel.files[number].split("/").slice(-1)[0];
    return `<button type="button" data-goto="${key}">${escaped(name)}:${line}</button>`;
  });
  return parts.length ? `<span class="chain">${parts.join(" inlined at ")}</span>` : "";
}

function describe(name, key) {
  const parts = [];
  if (name === "sass") {
    const { sass } = kernel;
    const c = sass.control[key];
    const waits = [0, 1, 2, 3, 4, 5].filter((b) => CONTROL.waits(c) >> b & 1);
    parts.push(`<code>${hex(16 * key)} ${escaped(sass.text[key].replace(/\t/g, " ").trim())}</code>`);
    const words = [`stalls ${CONTROL.stall(c)} ${CONTROL.stall(c) === 1 ? "cycle" : "cycles"}`];
    waits.forEach((b) => {
      const j = raisedBy(key, b);
      words.push(`waits for scoreboard ${b}` +
        (j < 0 ? "" : ` (${hex(16 * j)} ${escaped(sass.text[j].split("\t")[1])})`));
    });
    if (CONTROL.write(c) !== 7) words.push(`raises ${CONTROL.write(c)} until its result is written`);
    if (CONTROL.read(c) !== 7) words.push(`raises ${CONTROL.read(c)} until its operands are read`);
    if (CONTROL.yields(c)) words.push("may yield");
    if (sass.live[key] >= 0) words.push(`${sass.live[key]} registers live`);
    const pipe = index.pipes[sass.pipe[key]];
    const cost = kernel.costs[sass.cost[key]];
    words.push(`pipe ${pipe.name}${cost === null ? "" : `, ${cost} cycles of an SM`}`);
    parts.push(words.join("; "));
    parts.push(chainText(kernel.chain[sass.chain[key]]));
  } else if (name === "ptx") {
    const i = kernel.ptxAt.get(key);
    const count = kernel.sassOfPtx.get(key).length;
    parts.push(`<code>${escaped(kernel.ptx.text[i])}</code>`);
    if (kernel.ptx.isInstruction[i]) {
      parts.push(count ? `became ${count} SASS ${count === 1 ? "instruction" : "instructions"}`
        : "nothing is left of it, or it was merged into another");
    }
    parts.push(chainText(ptxChain(kernel, i)));
  } else {
    const all = kernel.sassOfLine.get(key) || [];
    const counts = new Map();
    all.forEach((i) => {
      const opcode = kernel.sass.text[i].split("\t")[1].split(".")[0];
      counts.set(opcode, (counts.get(opcode) || 0) + 1);
    });
    const [number, line] = key.split(":");
    parts.push(`<code>${escaped(kernel.files[number])}:${line}</code>`);
    const list = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 12);
    parts.push(all.length ? `${all.length} SASS instructions: ${list.map(([o, c]) => `${c} ${o}`).join(", ")}`
      : "no SASS instruction names this line");
  }
  byId("detail").innerHTML = parts.filter(Boolean).join(" &nbsp; ");
}

// ---- what is shown -------------------------------------------------------------------------------

function show(number, keep = true) {
  const path = kernel && keep ? kernel.files[file] : null;
  pinned = null;
  document.body.classList.remove("pinned");
  links = emptyLinks();
  kernel = load(number);
  const about = index.kernels[number];
  document.querySelectorAll("#versions button, #overview .version").forEach((element) => {
    element.setAttribute("aria-current", String(Number(element.dataset.kernel) === number));
  });
  byId("about").innerHTML = `<h2>${escaped(about.title)}</h2><div class="config">${escaped(about.symbol)}</div>` +
    `<dl class="facts">${about.facts.map(([term, value]) =>
      `<div><dt>${escaped(term)}</dt><dd>${escaped(value)}</dd></div>`).join("")}</dl>`;
  const select = byId("file");
  select.innerHTML = kernel.files.map((f, i) =>
    `<option value="${i}">${escaped(f)}</option>`).join("");
  select.hidden = !kernel.files.length;
  showPtx();
  showSass();
  const same = kernel.files.indexOf(path);
  if (kernel.files.length) showFile(same >= 0 && keep ? same : kernel.main);
  else fill("cuda", '<p class="empty">The cubin has no line table: compile with -lineinfo.</p>');
  showCounts();
  byId("detail").textContent = "Point at a line of any pane; click to pin it.";
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
  if (pinned) reveal(name, nearestLit(name));
}

function keyOf(name, element) {
  return name === "cuda" ? element.dataset.key : Number(element.dataset.key);
}

function setCursor(name, element) {
  const own = pane[name];
  own.cursor?.classList.remove("cursor");
  own.cursor = element;
  element.classList.add("cursor");
  own.code.setAttribute("aria-activedescendant", element.id);
  point(name, keyOf(name, element));
}

function moveCursor(name, by) {
  const { code, cursor } = pane[name];
  const all = [...pane[name].rows.values()];
  if (!all.length) return;
  const top = Math.ceil(code.scrollTop / ROW);
  const at = cursor ? all.indexOf(cursor) + by : Math.max(0, all.findIndex((r) => r.dataset.n >= top));
  const element = all[Math.min(all.length - 1, Math.max(0, at))];
  setCursor(name, element);
  reveal(name, element);
}

function nextLit(name, by) {
  const lit = [...links[name].lit].map((key) => pane[name].rows.get(key)).filter(Boolean);
  lit.sort((a, b) => a.dataset.n - b.dataset.n);
  if (!lit.length) return;
  const at = pane[name].cursor ? Number(pane[name].cursor.dataset.n) : -1;
  const following = by > 0 ? lit.find((r) => r.dataset.n > at) : lit.filter((r) => r.dataset.n < at).pop();
  const element = following || (by > 0 ? lit[0] : lit[lit.length - 1]);
  pane[name].cursor?.classList.remove("cursor");
  pane[name].cursor = element;
  element.classList.add("cursor");
  describe(name, keyOf(name, element));
  reveal(name, element);
}

function goTo(key) {
  const [wanted] = key.split(":").map(Number);
  if (wanted !== file) showFile(wanted);
  showTab("cuda");
  const target = pane.cuda.rows.get(key);
  if (target) {
    pinned = null;
    pin("cuda", key);
    pane.cuda.code.scrollTop = target.dataset.n * ROW - pane.cuda.code.clientHeight / 3;
  }
}

for (const name of PANES) {
  const { code } = pane[name];
  code.addEventListener("mouseover", (event) => {
    const element = event.target.closest(".row[data-key]");
    if (element) point(name, keyOf(name, element));
  });
  code.addEventListener("mouseleave", () => { if (!pinned) light(emptyLinks()); });
  code.addEventListener("click", (event) => {
    const target = event.target.closest(".target");
    const element = target ? pane.sass.rows.get(Number(target.dataset.target))
      : event.target.closest(".row[data-key]");
    if (!element) return;
    setCursor(name, element);
    if (target) reveal("sass", element);
    pin(name, keyOf(name, element));
  });
  code.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(code.clientHeight / ROW) - 2);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9 }[event.key];
    const other = PANES[PANES.indexOf(name) + { ArrowLeft: -1, ArrowRight: 1 }[event.key]];
    if (by) moveCursor(name, by);
    else if (other) { showTab(other); pane[other].code.focus(); }
    else if ((event.key === "Enter" || event.key === " ") && pane[name].cursor) pin(name, keyOf(name, pane[name].cursor));
    else if (event.key === "n") nextLit(name, 1);
    else if (event.key === "N") nextLit(name, -1);
    else return;
    event.preventDefault();
  });
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, dialog")) return;
  if (event.key === "[") step(-1);
  else if (event.key === "]") step(1);
  else if (event.key === "t") turnTheme();
  else if (event.key === "?") byId("help").showModal();
  else if (event.key === "Escape" && pinned) unpin();
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
byId("file").addEventListener("change", (event) => showFile(Number(event.target.value)));
byId("theme").addEventListener("click", turnTheme);
byId("help-button").addEventListener("click", () => byId("help").showModal());
window.addEventListener("resize", drawRulers);

if (index.kernels.length > 1) {
  byId("versions").innerHTML = index.kernels.map((k, i) =>
    `<button type="button" data-kernel="${i}" title="${escaped(k.title)}">${escaped(k.name)}</button>`).join("");
}
byId("tabs").innerHTML = PANES.map((name) =>
  `<button type="button" role="tab" data-tab="${name}">${name.toUpperCase()}<span class="found"></span></button>`).join("");
byId("tabs").addEventListener("click", (event) => {
  const button = event.target.closest("[data-tab]");
  if (button) showTab(button.dataset.tab);
});
byId("pipes").innerHTML = index.pipes.map((p) =>
  `<span class="key ${p.colour}">${escaped(p.name)}: ${escaped(p.what)}</span>`).join("");

const media = matchMedia("(prefers-color-scheme: dark)");
let stored = null;
try { stored = localStorage.getItem("theme"); } catch { /* as above */ }
setTheme(stored || (media.matches ? "dark" : "light"));
media.addEventListener("change", (event) => { if (!stored) setTheme(event.matches ? "dark" : "light"); });

// #v9/sass/120 opens the page where somebody pinned it.
const [wantedName, wantedPane, wantedKey] = decodeURIComponent(location.hash.slice(1)).split("/");
const wanted = index.kernels.findIndex((k) => k.name === wantedName);
show(wanted >= 0 ? wanted : index.shown, false);
showTab("sass");
if (wanted >= 0 && PANES.includes(wantedPane)) {
  const key = wantedPane === "cuda" ? wantedKey : Number(wantedKey);
  if (wantedPane === "cuda" && Number(wantedKey.split(":")[0]) in kernel.files) showFile(Number(wantedKey.split(":")[0]));
  const element = pane[wantedPane].rows.get(key);
  if (element) { pin(wantedPane, key); reveal(wantedPane, element); }
}
