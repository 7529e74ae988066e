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
    const words = [`stalls ${CONTROL.stall(c)} ${CONTROL.stall(c) === 1 ? "cycle" : "cycles"} of this warp`];
    waits.forEach((b) => {
      const j = raisedBy(data, Number(at), b);
      words.push(`waits for scoreboard ${b}` +
        (j < 0 ? "" : ` (${hex(16 * j)} ${escaped(sass.text[j].split("\t")[1])})`));
    });
    if (CONTROL.write(c) !== 7) words.push(`raises ${CONTROL.write(c)} until its result is written`);
    if (CONTROL.read(c) !== 7) words.push(`raises ${CONTROL.read(c)} until its operands are read`);
    if (CONTROL.yields(c)) words.push("may yield");
    if (sass.spill[at]) words.push("spills a register, or brings one back");
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
    if (hasArrived("sass")) all.forEach((i) => counts.set(opcodeOf(data, i), (counts.get(opcodeOf(data, i)) || 0) + 1));
    const [number, line] = at.split(":");
    parts.push(`<code>${escaped(data.files[number])}:${line}</code>`);
    parts.push(changeText(name, key));
    const list = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 12);
    parts.push(all.length ? `${all.length} SASS instructions${list.length ? ": " : ""}${list.map(([o, c]) => `${c} ${escaped(o)}`).join(", ")}`
      : "no SASS instruction names this line");
  }
  byId("detail").innerHTML = parts.filter(Boolean).join(" &nbsp; ");
}
