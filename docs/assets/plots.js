"use strict";
// Draws the plots of a page from the numbers beside them: a staircase of the steps, and lines by
// sequence length. What is pointed at, tapped or reached with the arrow keys tells its values.
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const TICK_PIXELS = 36;
  const COLOURS = 10; // --plot-1 to --plot-10 of the style sheet

  function svg(name, attributes, text) {
    const element = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function html(name, properties, ...children) {
    const element = Object.assign(document.createElement(name), properties);
    element.append(...children);
    return element;
  }

  const number = (value) => value.toFixed(1);

  // Steps of 1, 2, 2.5 or 5 times a power of ten, about one every TICK_PIXELS.
  function ticks(top, height) {
    const least = top / Math.max(2, Math.floor(height / TICK_PIXELS));
    const power = 10 ** Math.floor(Math.log10(least));
    const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= least);
    return Array.from({ length: Math.ceil(top / step) + 1 }, (_, n) => n * step);
  }

  class Plot {
    constructor(figure) {
      this.data = JSON.parse(figure.querySelector("script").textContent);
      this.area = figure.querySelector(".drawing");
      this.hidden = new Set();
      this.at = 0; // the point that the tab key reaches
      this.tip = html("div", { className: "tip", hidden: true });
      this.legend = html("div", { className: "legend" });
      this.area.after(this.legend);
      this.fillLegend();
      new ResizeObserver(() => this.draw()).observe(this.area);
    }

    get isStaircase() { return this.data.kind === "staircase"; }

    colour(series) {
      if (this.isStaircase) return ["var(--plot-main)", "var(--plot-best)"][series];
      return `var(--plot-${series % COLOURS + 1})`;
    }

    // The name of a series beside its colour, and its dashes where it has some.
    named(element, series) {
      const kind = this.isStaircase ? "" : ` line${this.isLibrary(series) ? " library" : ""}`;
      const found = html(element, { className: `swatch${kind}`, textContent: this.data.series[series] });
      found.style.setProperty("--own", this.colour(series));
      return found;
    }

    isLibrary(series) { return this.data.libraries.includes(this.data.series[series]); }

    shown() {
      return this.data.series.map((_, n) => n).filter((n) => !this.hidden.has(n));
    }

    fillLegend() {
      this.data.series.forEach((_, n) => {
        const key = this.named(this.isStaircase ? "span" : "button", n);
        this.legend.append(key);
        if (this.isStaircase) return;
        key.type = "button";
        key.title = "Show or hide";
        key.setAttribute("aria-pressed", "true");
        key.addEventListener("click", () => {
          if (!this.hidden.delete(n)) this.hidden.add(n);
          key.setAttribute("aria-pressed", String(!this.hidden.has(n)));
          this.draw();
        });
      });
    }

    draw() {
      const width = this.area.clientWidth;
      if (!width) return;
      const hadFocus = this.area.contains(document.activeElement);
      const { points } = this.data;
      const margin = { top: 26, right: 8, bottom: 40, left: 44 };
      const height = Math.round(Math.min(380, Math.max(250, width * 0.46)));
      const inner = { width: width - margin.left - margin.right, height: height - margin.top - margin.bottom };
      const values = points.flatMap((point) => this.shown().map((n) => point.values[n])).filter((v) => v !== null);
      const marks = ticks(Math.max(1, this.data.reference?.value ?? 0, ...values), inner.height);
      const top = marks[marks.length - 1];
      const band = inner.width / points.length;
      this.scale = {
        y: (value) => margin.top + inner.height * (1 - value / top),
        left: (n) => margin.left + n * band,
        middle: (n) => margin.left + (n + 0.5) * band,
        band,
      };
      const root = svg("svg", {
        viewBox: `0 0 ${width} ${height}`, height, role: "group",
        "aria-label": `${this.data.title}: ${points.length} points, left and right move between them`,
      });
      for (const mark of marks) {
        const y = this.scale.y(mark);
        root.append(svg("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: y, y2: y }));
        root.append(svg("text", { x: margin.left - 8, y: y + 4, "text-anchor": "end" }, String(mark)));
      }
      const longest = Math.max(...points.map((point) => point.x.length));
      const every = Math.ceil((9 * longest) / band); // there is room for so many
      points.forEach((point, n) => n % every || root.append(
        svg("text", { x: this.scale.middle(n), y: height - margin.bottom + 18, "text-anchor": "middle" }, point.x)));
      root.append(svg("text", { x: margin.left + inner.width / 2, y: height - 4, "text-anchor": "middle" },
        this.isStaircase ? "step" : "sequence length"));
      root.append(svg("text", { x: 0, y: 11 }, this.data.unit));
      (this.isStaircase ? this.drawStaircase : this.drawLines).call(this, root, width - margin.right);
      this.columns = points.map((point, n) => this.column(point, n, margin.top, inner.height));
      root.append(...this.columns);
      this.area.replaceChildren(root, this.tip);
      this.leave();
      if (hadFocus) this.columns[this.at].focus();
    }

    drawStaircase(root, right) {
      const { y, left, middle, band } = this.scale;
      const { points, reference } = this.data;
      const steps = points.map((point, n) => [n, point.values[0]]).filter(([, value]) => value !== null);
      const outline = steps.map(([n, value], k) => `${k ? "L" : "M"}${left(n)},${y(value)}H${left(n) + band}`).join("");
      const [first, last] = [steps[0][0], steps[steps.length - 1][0]];
      root.append(svg("path", { class: "under", d: `${outline}V${y(0)}H${left(first)}Z` }));
      root.append(svg("path", { class: "stairs", d: outline }));
      const line = y(reference.value);
      root.append(svg("line", { class: "reference", x1: left(0), x2: right, y1: line, y2: line }));
      const roomy = band > 34;
      root.append(svg("text", { x: left(1) + 4, y: roomy ? line - 6 : line + 30 }, reference.label));
      points.forEach((point, n) => {
        const [fixed, best] = point.values;
        if (fixed !== null && roomy) {
          root.append(svg("text", { class: "value", x: middle(n), y: y(fixed) + 16, "text-anchor": "middle" }, number(fixed)));
        }
        if (best === null || best === fixed) return;
        root.append(svg("line", { class: "tread", x1: left(n) + 2, x2: left(n) + band - 2, y1: y(best), y2: y(best) }));
        if (roomy) root.append(svg("text", { class: "value best", x: middle(n), y: y(best) - 7, "text-anchor": "middle" }, number(best)));
      });
    }

    drawLines(root) {
      const { y, middle } = this.scale;
      for (const n of this.shown()) {
        const group = svg("g", {});
        group.style.setProperty("--own", this.colour(n));
        const found = this.data.points.map((point, at) => [at, point.values[n]]).filter(([, value]) => value !== null);
        group.append(svg("polyline", {
          class: `series${this.isLibrary(n) ? " library" : ""}`,
          points: found.map(([at, value]) => `${middle(at)},${y(value)}`).join(" "),
        }));
        for (const [at, value] of found) group.append(svg("circle", { class: "dot", cx: middle(at), cy: y(value), r: 4 }));
        root.append(group);
      }
    }

    // Series and values of a point, the highest first where they are lines.
    told(point) {
      const found = this.shown().map((n) => [n, point.values[n]]).filter(([, value]) => value !== null);
      return this.isStaircase ? found : found.sort((a, b) => b[1] - a[1]);
    }

    column(point, n, top, height) {
      const words = this.told(point).map(([series, value]) => `${this.data.series[series]} ${number(value)} ${this.data.unit}`);
      const element = svg("rect", {
        class: "column", x: this.scale.left(n), y: top, width: this.scale.band, height, rx: 3, role: "img",
        "aria-label": `${point.title}: ${words.join(", ")}`, tabindex: n === this.at ? 0 : -1,
      });
      element.addEventListener("pointerenter", () => this.tell(n));
      element.addEventListener("pointerdown", () => this.tell(n));
      element.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.leave(); });
      element.addEventListener("focus", () => this.tell(n));
      element.addEventListener("blur", () => this.leave());
      element.addEventListener("keydown", (event) => this.key(event, n));
      return element;
    }

    key(event, n) {
      const last = this.columns.length - 1;
      const to = { ArrowRight: Math.min(last, n + 1), ArrowLeft: Math.max(0, n - 1), Home: 0, End: last }[event.key];
      if (event.key === "Escape") this.leave();
      if (to === undefined) return;
      event.preventDefault();
      this.columns[n].setAttribute("tabindex", -1);
      this.columns[to].setAttribute("tabindex", 0);
      this.at = to;
      this.columns[to].focus();
    }

    tell(n) {
      this.leave();
      const point = this.data.points[n];
      const rows = this.told(point).flatMap(([series, value]) =>
        [this.named("dt", series), html("dd", { textContent: `${number(value)} ${this.data.unit}` })]);
      this.tip.replaceChildren(html("b", { textContent: point.title }), html("dl", {}, ...rows));
      this.tip.hidden = false;
      this.columns[n].classList.add("at");
      const room = this.area.clientWidth - this.tip.offsetWidth;
      const { middle, band } = this.scale;
      const beside = middle(n) + band / 2 + 6;
      const x = beside <= room ? beside : middle(n) - band / 2 - 6 - this.tip.offsetWidth;
      this.tip.style.transform = `translate(${Math.min(Math.max(0, x), room)}px, ${24}px)`;
    }

    leave() {
      this.tip.hidden = true;
      this.columns.forEach((column) => column.classList.remove("at"));
    }
  }

  document.querySelectorAll("figure.plot").forEach((figure) => new Plot(figure));
})();
