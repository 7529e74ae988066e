// ---- what is shown -------------------------------------------------------------------------------

// The panes that can be seen.
const seen = () => PANES.filter((name) => !document.body.classList.contains("single") ||
  pane[name].root.classList.contains("shown"));

function show(number, keep = true, names = seen(), then = () => {}) {
  demand(number, names, () => {
    showNow(number, keep);
    then();
  });
}

// Load these panes of what is shown, if they are not there yet, draw them, and go on.
function ensure(names, then = () => {}) {
  const { number } = kernel;
  const missing = names.filter((name) => !hasArrived(name));
  if (!missing.length) then();
  else demand(number, missing, () => {
    if (kernel.number !== number) return; // another one is shown by now
    loaded.clear();
    kernel = load(number);
    parent = parent && load(parent.number);
    showNotes();
    showFilter();
    missing.forEach(render);
    showFirstChanges(missing);
    then();
  });
}

function showNow(number, keep) {
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
  const withText = [kernel.main, ...kernel.files.keys()].find((n) => index.sources[kernel.files[n]]);
  file = String(same >= 0 ? same : withText ?? kernel.main);
  byId("file").value = file;
  showNotes();
  showFilter();
  PANES.forEach((name) => { pane[name].cursor = null; });
  renderAll();
  showFirstChanges();
  showCounts();
  byId("detail").textContent = "Point at a line of any pane; click to pin it.";
}

function showNotes() {
  pane.ptx.note.textContent = pane.ptx.note.title = kernel.ptx.note;
  pane.sass.note.textContent = hasArrived("sass") ? `${kernel.sass.text.length} instructions` : "";
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
  ensure([name], () => {
    const { cursor } = pane[name];
    if (pinned) reveal(name, nearestLit(name));
    else if (cursor) reveal(name, cursor); // what is hidden does not scroll
  });
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
  for (const way of ["focusin", "click"]) pane[name].root.addEventListener(way, () => setActive(name));
  pane[name].root.addEventListener("click", () => pane[name].root.classList.remove("folded"));
  code.addEventListener("click", (event) => {
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
byId("search").addEventListener("input", () => ensure(PANES, () => PANES.forEach(findHits)));
for (const way of ["pointerdown", "focus"]) { // it lists the instructions
  byId("filter").addEventListener(way, () => ensure(["sass"]));
}
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
narrow.addEventListener("change", () => {
  setSingle();
  ensure(seen());
});

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
byId("marks").innerHTML = [...new Set(Object.values(CLASS))].map((kind) =>
  `${shownMarks.filter(([mark]) => CLASS[mark] === kind).map(([mark, meaning]) =>
    `<b style="color:var(--${mark === "≈" ? "soft" : kind})" title="${escaped(meaning)}">${escaped(mark)}</b>`).join("")} ${kind}`).join("");

const media = matchMedia("(prefers-color-scheme: dark)");
let stored = null;
try { stored = localStorage.getItem("theme"); } catch { /* as above */ }
setTheme(stored || (media.matches ? "dark" : "light"));
media.addEventListener("change", (event) => { if (!stored) setTheme(event.matches ? "dark" : "light"); });

// #v9/sass/120 opens the page where somebody pinned it; -120 is a line of the kernel before it.
const [wantedName, wantedPane, wantedKey] = decodeURIComponent(location.hash.slice(1)).split("/");
const wanted = index.kernels.findIndex((k) => k.name === wantedName);
const first = wanted >= 0 ? wanted : index.shown;
const changed = parsed(`diff-${first}`) ?? {};
const opened = ["cuda", "sass", "ptx"].find((name) => changed[name]?.some(([mark]) => isNews(mark))) || "sass";
pane[opened].root.classList.add("shown");
setSingle();
show(first, false, wantedKey ? PANES : seen(), () => {
  showTab(opened);
  if (wanted < 0 || !PANES.includes(wantedPane) || !wantedKey || !dataOf(wantedKey)) return;
  if (wantedPane === "cuda" && pathOf(fileOf(wantedKey))) showFile(shownWith(fileOf(wantedKey)));
  const element = pane[wantedPane].rows.get(wantedKey);
  if (element) {
    showTab(wantedPane);
    pin(wantedPane, wantedKey);
    reveal(wantedPane, element);
  }
});
