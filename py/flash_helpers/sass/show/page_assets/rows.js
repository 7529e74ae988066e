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
      const filler = loop?.filler ? `, ${loop.filler} of them filler` : "";
      const to = block.to.length ? ` to ${block.to.join(", ")}` : "";
      return `<span class="mark"></span><span class="gutter"></span><b>block ${b}</b>` +
        `<span>${escaped(block.phase)}${loop ? `, loop of ${loop.length} instructions${filler}` : ""};${from}${to}</span>`;
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
  if (!hasArrived(name)) return [];
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
  const html = name === "sass" && !split && rows.length ? [COLUMNS] : [];
  const keys = []; // of each row that has some
  const texts = [];
  own.changes = [];
  own.pairs.clear();
  const starts = [];
  let n = html.length;
  let folded = 0;
  let before = " "; // the mark above
  const showFold = () => {
    if (folded) html.push(`<div class="row fold">⋯ ${folded} lines${filter === "changes" ? " alike" : ""}</div>`);
    n += folded ? 1 : 0;
    before = folded ? " " : before;
    folded = 0;
  };
  rows.forEach((row, r) => {
    if (!shown[r] && !pale) { folded++; return; }
    showFold();
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
        ? parts.map((part) => (part ? `<div class="cell ${kind && `m-${kind}`} ${part.classes || ""}" data-key="${part.key}" title="${escaped(part.text)}">${mark}${part.html}</div>`
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
  showFold();
  own.code.innerHTML = html.length ? `<div class="rows ${name}">${html.join("")}</div>` : emptyText(name);
  fold(name, !rows.length && hasArrived(name) && !hasTextElsewhere(name));
  const elements = [...own.code.querySelectorAll(".row[data-key]")];
  own.rows.clear();
  elements.forEach((element, r) => keys[r].forEach((k) => own.rows.set(k, element)));
  own.hunks = starts.map(([r, isCode]) => ({ row: elements[r], isCode }));
  own.texts = elements.map((element, r) => [element, texts[r]]);
  const longest = texts.reduce((most, text, r) => (text.length > texts[most].length ? r : most), 0);
  elements[longest]?.classList.add("widest");
  own.cursor = null;
  if (own.rows.has(kept)) placeCursor(name, own.rows.get(kept));
  for (const kind of ["near", "lit"]) {
    links[name][kind].forEach((k) => own.rows.get(k)?.classList.add(kind));
  }
  findHits(name);
  drawRulers();
}

// A pane with nothing to show leaves its room to the others; a click on what is left of it says why.
function fold(name, isEmpty) {
  const { root, code } = pane[name];
  root.classList.toggle("folded", isEmpty);
  root.title = isEmpty ? code.textContent : "";
}

// Of CUDA, another file may be in the page.
const hasTextElsewhere = (name) => name === "cuda" &&
  [...byId("file").options].some(({ value }) => index.sources[pathOf(value)]);

function emptyText(name) {
  if (!hasArrived(name)) {
    const links = filesOfPane(kernel.number, name).map((path) => `<a href="${escaped(path)}">${escaped(path)}</a>`);
    return `<p class="empty">Not loaded: ${links.join(", ")}</p>`;
  }
  const why = {
    cuda: kernel.files.length ? `The text of ${escaped(pathOf(file) || "")} is not in this page: when it was made, ` +
      "there was no such file, or it had changed since the kernel was built."
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
