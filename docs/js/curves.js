// Curves one can choose from: <div class="curves" data-src="results/demo.json" data-part="text"
// data-x="x" data-label-x="steps" data-label-y="loss"></div>. A file is one that examples/demo.py
// has saved. Nothing is fetched from elsewhere.
(() => {
  const COLOURS = {
    AdamW: "#999999", "Muon + AdamW": "#E69F00", MISA: "#3d8fd1", FedAvg: "#999999",
    "FedAvg, 2 steps": "#CC79A7", Scaffold: "#D55E00", SISA: "#009E73",
  };
  const SVG = "http://www.w3.org/2000/svg";
  const [WIDTH, HEIGHT, LEFT, BELOW, ABOVE, RIGHT] = [640, 320, 48, 40, 26, 10];

  const make = (name, attributes, parent, text) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  };

  // One line per optimizer and kind of settings: the mean over its seeds.
  const lines = (runs, part, along) => {
    const found = new Map();
    for (const run of runs.filter((run) => run.task.part === part)) {
      const both = runs.some((other) => other.task.part === part &&
        other.task.name === run.task.name && other.task.kind !== run.task.kind);
      const name = run.task.name + (both ? `, ${run.task.kind}` : "");
      if (!found.has(name)) {
        found.set(name, { name, colour: COLOURS[run.task.name], kind: run.task.kind, both, runs: [] });
      }
      found.get(name).runs.push(run);
    }
    return [...found.values()].map((line) => ({
      ...line,
      x: line.runs[0][along],
      y: line.runs[0].y.map((_, i) =>
        line.runs.reduce((sum, run) => sum + run.y[i], 0) / line.runs.length),
    }));
  };

  const ticks = (low, high) => {
    const step = 10 ** Math.floor(Math.log10((high - low) / 3));
    const size = [1, 2, 5, 10].map((k) => k * step).find((s) => (high - low) / s <= 6);
    const first = Math.ceil(low / size) * size;
    return Array.from({ length: Math.floor((high - first) / size + 1e-9) + 1 }, (_, i) =>
      Number((first + i * size).toPrecision(6)));
  };

  const draw = (box, all) => {
    const hidden = new Set();
    const chosen = new URLSearchParams(location.hash.slice(1)).get("only");
    if (chosen) all.filter((line) => !line.name.includes(chosen)).forEach((l) => hidden.add(l.name));
    const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" }, box);
    const legend = box.appendChild(document.createElement("div"));
    legend.className = "curves-legend";
    const values = box.appendChild(document.createElement("div"));
    values.className = "curves-values";
    values.textContent = "Move over the picture for values.";

    const render = () => {
      svg.replaceChildren();
      const shown = all.filter((line) => !hidden.has(line.name));
      const xs = all.flatMap((line) => line.x), ys = (shown.length ? shown : all).flatMap((l) => l.y);
      const [x0, x1] = [0, Math.max(...xs)], [y0, y1] = [Math.min(...ys), Math.max(...ys)];
      const px = (x) => LEFT + ((x - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
      const py = (y) => ABOVE + (1 - (y - y0) / (y1 - y0 || 1)) * (HEIGHT - ABOVE - BELOW);
      for (const x of ticks(x0, x1)) {
        make("text", { x: px(x), y: HEIGHT - BELOW + 16, "text-anchor": "middle" }, svg, x.toLocaleString("en"));
      }
      for (const y of ticks(y0, y1)) {
        make("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: py(y), y2: py(y), class: "curves-grid" }, svg);
        make("text", { x: LEFT - 6, y: py(y) + 4, "text-anchor": "end" }, svg, y);
      }
      make("text", { x: WIDTH / 2, y: HEIGHT - 6, "text-anchor": "middle" }, svg, box.dataset.labelX);
      make("text", { x: LEFT, y: 14, "text-anchor": "start" }, svg, box.dataset.labelY);
      for (const line of shown) {
        const points = line.x.map((x, i) => `${px(x).toFixed(1)},${py(line.y[i]).toFixed(1)}`);
        const dashed = line.both && line.kind === "default" ? "2 4" : "none";
        make("polyline", {
          points: points.join(" "), fill: "none", stroke: line.colour, "stroke-dasharray": dashed,
          "stroke-width": line.name.startsWith("MISA") ? 3 : 1.8, "data-name": line.name,
        }, svg);
      }
      const cursor = make("line", { x1: -9, x2: -9, y1: ABOVE, y2: HEIGHT - BELOW, class: "curves-cursor" }, svg);
      svg.onpointermove = (event) => {
        const frame = svg.getBoundingClientRect();
        const at = ((event.clientX - frame.left) / frame.width) * WIDTH;
        const x = x0 + ((at - LEFT) / (WIDTH - LEFT - RIGHT)) * (x1 - x0);
        cursor.setAttribute("x1", px(x));
        cursor.setAttribute("x2", px(x));
        values.textContent = shown.map((line) => {
          const i = line.x.reduce((best, each, k) =>
            Math.abs(each - x) < Math.abs(line.x[best] - x) ? k : best, 0);
          return `${line.name}: ${line.y[i].toPrecision(3)} at ${line.x[i].toLocaleString("en")}`;
        }).join("   ");
      };
    };

    for (const line of all) {
      const button = legend.appendChild(document.createElement("button"));
      button.type = "button";
      button.textContent = line.name;
      button.style.borderColor = line.colour;
      button.setAttribute("aria-pressed", String(!hidden.has(line.name)));
      button.onclick = () => {
        if (!hidden.delete(line.name)) hidden.add(line.name);
        button.setAttribute("aria-pressed", String(!hidden.has(line.name)));
        render();
      };
    }
    render();
  };

  const start = async () => {
    for (const box of document.querySelectorAll("div.curves[data-src]")) {
      if (box.childElementCount) continue;
      try {
        const saved = await (await fetch(box.dataset.src)).json();
        draw(box, lines(saved.runs, box.dataset.part, box.dataset.x));
      } catch (error) {
        box.textContent = `The curves could not be loaded (${error.message}).`;
      }
    }
  };
  start();
})();
