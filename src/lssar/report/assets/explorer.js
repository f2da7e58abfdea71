// The explorer: a token's row of attention, marked in the text, as numbers and as a chart.

const floatsOf = (shorts) => {  // bfloat16 to float32: the upper half of its bits
  const out = new Uint32Array(shorts.length);
  for (let i = 0; i < shorts.length; i++) out[i] = shorts[i] << 16;
  return new Float32Array(out.buffer);
};

// The rows of one head, as `pack_rows` of explorer.py lays them out.
class Rows {
  constructor(buffer, tokens, head) {
    let at = 0;
    const take = (Type, count) => {
      const bytes = count * Type.BYTES_PER_ELEMENT;
      const part = new Type(buffer.slice(at, at + bytes));
      at += bytes;
      return part;
    };
    this.head = head;
    this.above = take(Int32Array, tokens);
    this.leftOut = floatsOf(take(Uint16Array, tokens));
    this.effective = floatsOf(take(Uint16Array, tokens));
    this.weights = floatsOf(take(Uint16Array, head.entries));
    this.before = head.p === null ? null : floatsOf(take(Uint16Array, head.entries));
    const low = take(Uint16Array, head.entries), high = take(Uint8Array, head.entries);
    const counts = take(Uint8Array, tokens);
    this.starts = new Uint32Array(tokens + 1);
    for (let i = 0; i < tokens; i++) this.starts[i + 1] = this.starts[i] + counts[i];
    this.keys = new Uint32Array(head.entries);
    for (let i = 0; i < tokens; i++) {
      for (let e = this.starts[i]; e < this.starts[i + 1]; e++) this.keys[e] = i - low[e] - 65536 * high[e];
    }
  }
  row(i) {
    const [a, b] = [this.starts[i], this.starts[i + 1]];
    return {
      keys: this.keys.subarray(a, b), weights: this.weights.subarray(a, b), before: this.before?.subarray(a, b),
      seen: Math.min(i + 1, this.head.window ?? i + 1), above: this.above[i], leftOut: this.leftOut[i],
      effective: this.effective[i],
    };
  }
}

const number = (value, digits = 3) =>
  value === 0 ? "0" : Math.abs(value) < 1e-3 ? value.toExponential(1) : Number(value.toPrecision(digits)).toLocaleString("en");
const percent = (value) => (value >= 0.9995 ? "100%" : (100 * value).toFixed(value < 0.01 ? 2 : 1) + "%");

class Pane {
  constructor(element, pane) {
    this.element = element;
    this.pane = pane;
    this.find = (selector) => element.querySelector(selector);
    this.box = this.find(".tokens");
    this.marked = [];
    this.at = null;
    this.offsets = new Uint32Array(pane.tokens.length + 1);  // characters before each token, to find it in another pane
    pane.tokens.forEach((text, i) => { this.offsets[i + 1] = this.offsets[i] + (i === 0 ? 0 : text.length); });
    this.makeTokens();
    this.makeSelects();
  }

  makeTokens() {
    this.spans = [];
    let chunk = document.createElement("div");
    chunk.className = "chunk";
    const done = document.createDocumentFragment();
    this.pane.tokens.forEach((text, i) => {
      const span = document.createElement("span");
      span.dataset.i = i;
      const end = text.endsWith("\n");
      span.textContent = end ? text.replace(/\n$/, "↵") : text;
      if (text === "\n") span.className = "break";
      chunk.append(span);
      this.spans.push(span);
      if (end && chunk.childElementCount >= 256) {  // a chunk ends with a line, so that chunks stack as blocks
        done.append(chunk);
        chunk = document.createElement("div");
        chunk.className = "chunk";
      } else if (end) {
        chunk.append("\n");
      }
    });
    done.append(chunk);
    this.box.replaceChildren(done);
  }

  makeSelects() {
    this.layer = this.find("select.layer");
    this.head = this.find("select.head");
    for (const layer of this.pane.layers) {
      const kinds = [...new Set(layer.heads.map((head) => head.mechanism))].join(" + ");
      this.layer.add(new Option(`${layer.layer}: ${kinds}`));
    }
    const global = this.pane.layers.findLastIndex((layer) => layer.heads.some((head) => head.window === null));
    this.layer.selectedIndex = Math.max(0, global);
    this.layer.addEventListener("change", () => { this.fillHeads(); this.load(); });
    this.head.addEventListener("change", () => this.load());
    this.fillHeads();
  }

  fillHeads() {
    const heads = this.pane.layers[this.layer.selectedIndex].heads;
    this.head.replaceChildren(...heads.map((head, i) => new Option(`${i}: ${head.mechanism}`)));
    this.head.selectedIndex = 0;
  }

  async load() {
    const head = this.pane.layers[this.layer.selectedIndex].heads[this.head.selectedIndex];
    const buffer = await unpack(head.blob);
    this.rows = new Rows(buffer, this.pane.tokens.length, head);
    this.element.dataset.head = head.blob;
    if (this.at !== null) this.show(this.at);
  }

  clear() {
    for (const span of this.marked) span.style.backgroundColor = "";
    this.marked = [];
    if (this.at !== null) this.spans[this.at].classList.remove("at");
    this.at = null;
    clearTimeout(this.drawing);
    this.find(".facts").innerHTML = '<p class="empty">No token chosen.</p>';
    this.find(".keys").replaceChildren();
    Plotly.react(this.find(".chart"), [], this.chartLayout(false), chartConfig);
  }

  show(i) {
    if (!this.rows) return;
    for (const span of this.marked) span.style.backgroundColor = "";
    this.marked = [];
    if (this.at !== null) this.spans[this.at].classList.remove("at");
    this.at = i;
    this.spans[i].classList.add("at");
    const row = this.rows.row(i);
    const largest = row.weights[0] || 1;
    row.keys.forEach((key, e) => {
      const weight = row.weights[e];
      if (weight <= 0) return;
      const span = this.spans[key];
      span.style.backgroundColor = `rgba(var(--mark), ${(0.12 + 0.78 * Math.sqrt(weight / largest)).toFixed(3)})`;
      this.marked.push(span);
    });
    this.element.dataset.token = i;
    this.showFacts(i, row);
    this.showKeys(row);
    clearTimeout(this.drawing);  // the chart takes longest: it waits until the pointer rests
    this.drawing = setTimeout(() => this.showChart(i, row), 80);
  }

  showFacts(i, row) {
    const head = this.rows.head;
    const loss = this.pane.losses[i];
    const facts = [
      ["token", `${i.toLocaleString("en")} ${JSON.stringify(this.pane.tokens[i])}`],
      ["sees", `${row.seen.toLocaleString("en")} keys`],
      ["mean weight, 1/n", number(1 / row.seen)],
    ];
    if (head.p !== null) {
      facts.push(["threshold", row.seen <= 3 ? "0 (first three rows)" : head.threshold === 1 ? "the mean" : `${number(head.threshold)} × the mean`]);
      facts.push(["survive it", `${row.above.toLocaleString("en")} keys (${percent(row.above / row.seen)})`]);
    } else {
      facts.push(["above the mean", `${row.above.toLocaleString("en")} keys (${percent(row.above / row.seen)})`]);
    }
    facts.push(["effective keys", number(row.effective)]);
    facts.push(["not shown", `${percent(row.leftOut)} of the weight`]);
    if (loss !== null) facts.push(["loss of this token", `${loss} nats`]);
    this.find(".facts").innerHTML = facts.map(([name, value]) => `<div><div class="name">${name}</div><div class="value"></div></div>`).join("");
    this.find(".facts").querySelectorAll(".value").forEach((element, f) => { element.textContent = facts[f][1]; });
  }

  showKeys(row) {
    const near = window.innerWidth < 640 ? 5 : 12;  // tokens shown around a key
    const items = [...row.keys].slice(0, 12).map((key, e) => {
      const item = document.createElement("li");
      if (row.weights[e] <= 0) item.className = "cut";
      const go = document.createElement("button");
      go.type = "button";
      go.textContent = key.toLocaleString("en");
      go.title = "Show this key in the text";
      go.addEventListener("click", () => this.spans[key].scrollIntoView({ block: "center" }));
      const around = document.createElement("span");
      around.className = "around";
      const visible = (text) => text.replace(/\n/g, "↵");
      const bold = document.createElement("b");
      bold.textContent = visible(this.pane.tokens[key]);
      around.append(visible(this.pane.tokens.slice(Math.max(0, key - near), key).join("")), bold,
        visible(this.pane.tokens.slice(key + 1, key + 1 + near).join("")));
      const weight = document.createElement("span");
      weight.className = "weight";
      weight.textContent = percent(row.weights[e]) + (row.before ? `  (${number(row.before[e])}× mean)` : "");
      item.append(go, around, weight);
      return item;
    });
    this.find(".keys").replaceChildren(...items);
  }

  chartLayout(reweighted) {
    const axis = { automargin: true, fixedrange: true, zeroline: false, showline: true };
    const layout = {
      margin: { l: 8, r: 8, t: 8, b: 8 }, font: { size: 11 }, showlegend: reweighted, bargap: 0.2,
      legend: { orientation: "h", y: 1.18, x: 0 }, hovermode: "closest",
      xaxis: { ...axis, title: { text: "position of the key" }, range: [-1, this.pane.tokens.length] },
      yaxis: { ...axis, title: { text: "weight" }, rangemode: "tozero" },
    };
    if (reweighted) {
      layout.yaxis2 = { ...axis, overlaying: "y", side: "right", title: { text: "× mean" }, rangemode: "tozero", showgrid: false };
      layout.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, yref: "y2", y0: this.rows.head.threshold, y1: this.rows.head.threshold, line: { dash: "dot", width: 1 } }];
    }
    return withChanges(layout, themeOf(layout));
  }

  showChart(i, row) {
    const x = [...row.keys];
    const stems = { x: [], y: [] };
    x.forEach((key, e) => { stems.x.push(key, key, null); stems.y.push(0, row.weights[e], null); });
    const text = x.map((key) => JSON.stringify(this.pane.tokens.slice(Math.max(0, key - 6), key + 7).join("")));
    const red = `rgb(${cssVariable("--mark")})`;
    const data = [
      { ...stems, mode: "lines", line: { color: red, width: 2 }, hoverinfo: "skip", showlegend: false },
      { x, y: [...row.weights], mode: "markers", name: "weight", marker: { color: red, size: 6 }, text,
        hovertemplate: "key %{x}: %{y:.3g}<br>%{text}<extra></extra>" },
    ];
    if (row.before) {
      data.push({ x, y: [...row.before], yaxis: "y2", mode: "markers", name: "before re-weighting (dotted: threshold)",
        marker: { color: "#6f9ed8", size: 6, symbol: "circle-open" }, hovertemplate: "key %{x}: %{y:.3g} × mean<extra></extra>" });
    }
    Plotly.react(this.find(".chart"), data, this.chartLayout(Boolean(row.before)), chartConfig);
    this.find(".chart").dataset.token = i;
  }

  // The token at a place in the text, for panes with other tokenizers.
  tokenAt(offset) {
    let low = 0, high = this.pane.tokens.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.offsets[middle] <= offset) low = middle; else high = middle - 1;
    }
    return low;
  }
}

async function startExplorer() {
  if (!checkBrowser()) return;
  const panes = readJson("panes").map((pane, i) => new Pane(document.querySelector(`[data-pane="${i}"]`), pane));
  await Promise.all([loadLibrary(), ...panes.map((pane) => pane.load())]);
  let pinned = false, waiting = null;

  function choose(source, i, reveal) {
    for (const pane of panes) {
      const at = pane === source ? i : pane.tokenAt(source.offsets[i]);
      pane.show(at);
      if (reveal) pane.spans[at].scrollIntoView({ block: "nearest" });
    }
  }
  function speak(source) {
    const row = source.rows.row(source.at);
    const best = [...row.keys].slice(0, 3).map((key, e) => `${JSON.stringify(source.pane.tokens[key])} at ${key}, ${percent(row.weights[e])}`);
    document.getElementById("spoken").textContent = `Token ${source.at} attends to ${best.join("; ")}`;
  }
  function release() {
    pinned = false;
    panes.forEach((pane) => pane.clear());
  }

  for (const pane of panes) {
    pane.box.addEventListener("pointerover", (event) => {
      const i = event.target.dataset?.i;
      if (i === undefined || pinned || event.pointerType === "touch") return;
      if (waiting === null) requestAnimationFrame(() => { const w = waiting; waiting = null; if (!pinned) choose(w[0], w[1], false); });
      waiting = [pane, Number(i)];  // one row a frame, the last that was pointed at
    });
    pane.box.addEventListener("click", (event) => {
      const i = event.target.dataset?.i;
      if (i === undefined) return;
      if (pinned && pane.at === Number(i)) return release();
      pinned = true;
      choose(pane, Number(i), false);
      speak(pane);
    });
    pane.box.addEventListener("keydown", (event) => {
      const last = pane.spans.length - 1, at = pane.at ?? 0;
      const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last, PageUp: at - 256, PageDown: at + 256 };
      let to = moves[event.key];
      if (event.key === "ArrowUp" || event.key === "ArrowDown") to = lineFrom(pane, at, event.key === "ArrowUp" ? -1 : 1);
      if (event.key === "Escape") return release();
      if (to === undefined) return;
      event.preventDefault();
      pinned = true;
      choose(pane, Math.min(last, Math.max(0, to)), true);
      speak(pane);
    });
  }
  document.addEventListener("theme", () => panes.forEach((pane) => {
    if (pane.at === null) pane.clear(); else pane.show(pane.at);
  }));
  release();
  document.documentElement.dataset.ready = "1";
}

// The token above or below: the nearest on the next line in that direction.
function lineFrom(pane, at, direction) {
  const here = pane.spans[at].getBoundingClientRect();
  let line = null, best = at, distance = Infinity;
  for (let i = at + direction; i >= 0 && i < pane.spans.length && Math.abs(i - at) < 2000; i += direction) {
    const box = pane.spans[i].getBoundingClientRect();
    if (Math.abs(box.top - here.top) < 4) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) > 4) break;
    if (Math.abs(box.left - here.left) < distance) { distance = Math.abs(box.left - here.left); best = i; }
  }
  return best;
}

startExplorer().catch((error) => fail("The page could not be drawn: " + error.message));
