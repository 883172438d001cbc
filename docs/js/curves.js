// Curves to choose from. docs/_hooks/curves.py puts their data into the page, as JSON in a script
// element of every <figure class="curves">: [{title, x, y, log, percent, lines, missing}, ...].
(() => {
  // By what an optimizer is, so that it has one colour on all pages; the rest take those left over.
  const COLOURS = {
    AdamW: "#8a8a8a", Adam: "#b08968", FedAvg: "#8a8a8a", "Muon + AdamW": "#e08e2b", MISA: "#3f88c5",
    SISA: "#1f9e77", NSISA: "#8e6bbf", SGD: "#8f9e2f", Scaffold: "#d1495b", FedProx: "#e08e2b",
    FedNova: "#8f9e2f", SOAP: "#d1495b", AdaBelief: "#d1495b", "FedAvg, 2 steps": "#cc79a7",
  };
  const OTHERS = ["#d1495b", "#e08e2b", "#8f9e2f", "#1f9e77", "#3f88c5", "#8e6bbf", "#b08968", "#cc79a7"];
  const DASHES = ["none", "6 3", "2 3", "8 3 2 3"];
  const SVG = "http://www.w3.org/2000/svg";
  const [LEFT, BELOW, ABOVE, RIGHT] = [56, 40, 26, 16];

  const make = (name, attributes, parent, text) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  };
  const add = (parent, tag, className, text = "") => {
    const node = parent.appendChild(document.createElement(tag));
    node.className = className;
    node.textContent = text;
    return node;
  };
  const short = (value) => Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });

  // Variants of an optimizer share its colour and are told apart by their dashes.
  const style = (lines) => {
    const used = new Map();
    let free = 0;
    return lines.map((line) => {
      const root = line.name in COLOURS ? line.name : line.name.split(/,| at /)[0];
      const known = COLOURS[root];
      const colour = known ?? OTHERS[free++ % OTHERS.length];
      const variants = used.get(colour) ?? 0;
      used.set(colour, variants + 1);
      return { ...line, colour, dash: DASHES[variants % DASHES.length], wide: root === "MISA" };
    });
  };

  const linearTicks = (low, high) => {
    const step = 10 ** Math.floor(Math.log10((high - low) / 3));
    const size = [1, 2, 5, 10].map((k) => k * step).find((s) => (high - low) / s <= 6);
    const first = Math.ceil(low / size) * size;
    return Array.from({ length: Math.floor((high - first) / size + 1e-9) + 1 }, (_, i) =>
      Number((first + i * size).toPrecision(6)));
  };
  const logTicks = (low, high) => {
    const powers = Math.log10(high / low);
    const within = [1, 2, 5].slice(0, powers > 2 ? 1 : 3);
    const every = Math.max(1, Math.ceil(powers / 6));
    const found = [];
    for (let k = Math.floor(Math.log10(low)); k <= Math.log10(high); k += 1) {
      if (k % every) continue;
      found.push(...within.map((m) => m * 10 ** k).filter((v) => v >= low && v <= high));
    }
    return found.length > 1 ? found : linearTicks(low, high);
  };

  const percentTicks = (low, high) => [20, 30, 40, 50, 60, 70, 80, 85, 90, 92, 94, 95, 96, 97, 98, 99]
    .filter((tick) => tick >= low && tick <= high);

  const draw = (box, panel, hidden) => {
    const lines = style(panel.lines);
    const svg = make("svg", { role: "img" }, box);
    const legend = add(box, "div", "curves-legend");
    const values = add(box, "div", "curves-values", "Point at the picture for values; click on a name to hide it.");
    if (panel.missing.length) add(box, "div", "curves-missing", `Not run: ${panel.missing.join("; ")}.`);

    const render = () => {
      svg.replaceChildren();
      const WIDTH = Math.max(320, box.clientWidth || 640);
      const HEIGHT = Math.min(400, Math.max(260, WIDTH / 2));
      svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
      const shown = lines.filter((line) => !hidden.has(line.name));
      const ys = (shown.length ? shown : lines).flatMap((line) => line.y);
      const xs = lines.flatMap((line) => line.x);
      const [least, x1] = [Math.min(...xs), Math.max(...xs)];
      const x0 = least > x1 / 3 ? least : 0;
      const [y0, y1] = [Math.min(...ys), Math.max(...ys)];
      const log = panel.log && y0 > 0;
      // Percentages widen towards 100, where the good ones differ.
      const along = panel.percent ? (y) => -Math.log(100.1 - y) : log ? Math.log : (y) => y;
      const ticks = panel.percent ? percentTicks : log ? logTicks : linearTicks;
      const px = (x) => LEFT + ((x - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
      const share = (y) => (along(y) - along(y0)) / (along(y1) - along(y0) || 1);
      const py = (y) => ABOVE + (1 - share(y)) * (HEIGHT - ABOVE - BELOW);
      for (const x of linearTicks(x0, x1).filter((_, i, all) => WIDTH > 500 || all.length < 5 || i % 2 === 0)) {
        make("text", { x: px(x), y: HEIGHT - BELOW + 16, "text-anchor": "middle" }, svg, short(x));
      }
      for (const y of y1 > y0 ? ticks(y0, y1) : [y0]) {
        make("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: py(y), y2: py(y), class: "curves-grid" }, svg);
        const text = Math.abs(y) >= 1e-4 || y === 0 ? y.toLocaleString("en") : y.toExponential(0);
        make("text", { x: LEFT - 6, y: py(y) + 4, "text-anchor": "end" }, svg, text);
      }
      make("text", { x: WIDTH / 2, y: HEIGHT - 6, "text-anchor": "middle" }, svg, panel.x);
      make("text", { x: 4, y: 14, "text-anchor": "start" }, svg, panel.y + (log ? " (log scale)" : ""));
      for (const line of shown) {
        const points = line.x.map((x, i) => `${px(x).toFixed(1)},${py(line.y[i]).toFixed(1)}`);
        make("polyline", {
          points: points.join(" "), fill: "none", stroke: line.colour, "stroke-dasharray": line.dash,
          "stroke-width": line.wide ? 3 : 1.8, "data-name": line.name,
        }, svg);
      }
      const cursor = make("line", { x1: -9, x2: -9, y1: ABOVE, y2: HEIGHT - BELOW, class: "curves-cursor" }, svg);
      svg.onpointermove = (event) => {
        const frame = svg.getBoundingClientRect();
        const at = ((event.clientX - frame.left) / frame.width) * WIDTH;
        const x = Math.min(x1, Math.max(x0, x0 + ((at - LEFT) / (WIDTH - LEFT - RIGHT)) * (x1 - x0)));
        cursor.setAttribute("x1", px(x));
        cursor.setAttribute("x2", px(x));
        values.textContent = shown.map((line) => {
          const i = line.x.reduce((best, each, k) =>
            Math.abs(each - x) < Math.abs(line.x[best] - x) ? k : best, 0);
          return `${line.name}: ${short(line.y[i])} at ${short(line.x[i])}`;
        }).join("   ");
      };
    };

    for (const line of lines) {
      const button = add(legend, "button", "");
      const sample = make("svg", { viewBox: "0 0 24 8", "aria-hidden": "true" }, button);
      const stroke = { stroke: line.colour, "stroke-dasharray": line.dash, "stroke-width": line.wide ? 3 : 2 };
      make("line", { x1: 0, x2: 24, y1: 4, y2: 4, ...stroke }, sample);
      button.append(line.name + (line.runs > 1 ? ` (${line.runs} seeds)` : ""));
      button.type = "button";
      button.setAttribute("aria-pressed", String(!hidden.has(line.name)));
      button.onclick = () => {
        if (!hidden.delete(line.name)) hidden.add(line.name);
        button.setAttribute("aria-pressed", String(!hidden.has(line.name)));
        render();
      };
    }
    render();
    return render;
  };

  for (const figure of document.querySelectorAll("figure.curves")) {
    const panels = JSON.parse(figure.querySelector("script").textContent);
    const hidden = new Set(); // names that stay hidden from panel to panel
    const choice = panels.length > 1 ? add(figure, "select", "curves-choice") : null;
    const box = add(figure, "div", "curves-panel");
    let render;
    const show = (number) => {
      box.replaceChildren();
      render = draw(box, panels[number], hidden);
    };
    addEventListener("resize", () => render());
    if (choice) {
      choice.setAttribute("aria-label", "panel");
      panels.forEach((panel, number) => {
        const option = add(choice, "option", "", panel.title + (panel.lines.length ? "" : " (not run)"));
        option.value = number;
        option.disabled = !panel.lines.length;
      });
      choice.onchange = () => show(choice.value);
    }
    const first = panels.findIndex((panel) => panel.lines.length);
    if (choice) choice.value = first;
    show(first);
  }
})();
