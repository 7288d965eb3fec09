// A click on a heading of the closing table sorts it.
for (const [k, head] of document.querySelectorAll("#numbers th").entries())
  head.onclick = () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = document.querySelector("#numbers tbody");
    const key = row => k ? parseFloat(row.cells[k].dataset.value) : row.cells[0].textContent;
    const order = (a, b) => k ? (isNaN(a) - isNaN(b)) || (down ? b - a : a - b) : (down ? -1 : 1) * a.localeCompare(b);
    body.append(...[...body.rows].sort((r, s) => order(key(r), key(s))));
  };

const COLORS = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const WHITE_TO_BLUE = ["#f7fbff", "#deebf7", "#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b"]
  .map((color, k) => [k / 8, color]);  // Plotly's own "Blues" begins with the dark end
const AXES = {rounds: "communication rounds", megabytes: "megabytes sent by the clients", seconds: "seconds"};
const LOOK = {
  font: {family: "system-ui, sans-serif", size: 13}, plot_bgcolor: "white", paper_bgcolor: "white",
  xaxis: {gridcolor: "#e8e8e8", linecolor: "#999", zeroline: false},
  yaxis: {gridcolor: "#e8e8e8", linecolor: "#999", zeroline: false, exponentformat: "power"},
  hoverlabel: {namelength: -1},
};
const id = k => k ? String(k + 1) : "";  // the axes of panel k are xaxis, xaxis2, xaxis3, ...

// The domains of panel k of `rows` rows and `columns` columns, first row on top.
function place(k, rows, columns, across, down) {
  const width = (1 - across * (columns - 1)) / columns, height = (1 - down * (rows - 1)) / rows;
  const left = (k % columns) * (width + across), top = 1 - Math.floor(k / columns) * (height + down);
  return [[left, left + width], [top - height, top]];
}

function buttons(x, choices) {
  return {type: "buttons", direction: "right", x, xanchor: "left", y: 1, yanchor: "bottom", pad: {b: 12},
    showactive: true, buttons: choices.map(([label, method, args]) => ({label, method, args}))};
}

// Each drawing returns data and layout for Plotly.
const DRAWINGS = {
  curves({panels, lines}) {
    const rows = Math.max(1, Math.ceil(panels.length / 2)), data = [], along = {}, named = new Set();
    for (const axis in AXES) along[axis] = [];
    for (const {panel, method, name, x, y, low, high} of lines) {
      const color = COLORS[method % COLORS.length], dash = DASHES[method % DASHES.length];
      const style = {type: "scatter", mode: "lines", name, legendgroup: name, xaxis: "x" + id(panel), yaxis: "y" + id(panel)};
      if (low) {
        const y = [...high, ...[...low].reverse()];
        data.push({...style, y, fill: "toself", opacity: 0.2, line: {width: 0, color}, showlegend: false, hoverinfo: "skip"});
        for (const axis in AXES) along[axis].push([...x[axis], ...[...x[axis]].reverse()]);
      }
      const hovertemplate =
        "<b>%{fullData.name}</b><br>%{x:,.6~g}<br>" + panels[panel].title + " %{y:.4~g}<extra></extra>";
      data.push({...style, y, line: {color, dash, width: 1.8}, showlegend: !named.has(name), hovertemplate});
      named.add(name);
      for (const axis in AXES) along[axis].push(x[axis]);
    }
    for (const [k, trace] of data.entries()) trace.x = along.rounds[k];
    const titles = axis => Object.fromEntries(panels.map((_, k) => ["xaxis" + id(k) + ".title.text", AXES[axis]]));
    const menus = [buttons(0, Object.keys(AXES).map(axis => [axis, "update", [{x: along[axis]}, titles(axis)]]))];
    const falling = panels.map((panel, k) => panel.log ? k : -1).filter(k => k >= 0);
    const scales = kind => Object.fromEntries(falling.map(k => ["yaxis" + id(k) + ".type", kind]));
    if (falling.length)
      menus.push(buttons(0.5, ["log", "linear"].map(kind => [kind + " axes", "relayout", [scales(kind)]])));
    const layout = {
      template: {layout: LOOK}, height: 340 * rows + 90, margin: {l: 60, r: 10, t: 70, b: 50}, updatemenus: menus,
      legend: {groupclick: "togglegroup", y: 1, yanchor: "top"},
    };
    for (const [k, {title, log}] of panels.entries()) {
      const [x, y] = place(k, rows, 2, 0.09, 0.32 / rows);
      layout["xaxis" + id(k)] = {domain: x, anchor: "y" + id(k), title: {text: AXES.rounds}};
      layout["yaxis" + id(k)] = {domain: y, anchor: "x" + id(k), title: {text: title, standoff: 4},
        type: log ? "log" : "linear", minorloglabels: "none"};
    }
    return {data, layout};
  },

  layers({zeros, layers, methods}) {
    const heat = {type: "heatmap", z: zeros, x: layers, y: methods, zmin: 0, zmax: 100, colorscale: WHITE_TO_BLUE,
      colorbar: {title: {text: "zeros (%)"}}, hovertemplate: "%{y}<br>%{x}: %{z:.2f} % zero<extra></extra>"};
    if (layers.length <= 24) heat.texttemplate = "%{z:.1f}";
    return {data: [heat], layout: {
      template: {layout: LOOK}, height: 150 + 30 * methods.length, margin: {t: 20},
      yaxis: {autorange: "reversed", automargin: true, type: "category"}, xaxis: {type: "category", automargin: true},
    }};
  },

  "first-layer"(pictures) {
    const columns = Math.min(4, pictures.length), rows = Math.ceil(pictures.length / columns);
    const layout = {template: {layout: LOOK}, height: 280 * rows + 40, margin: {t: 40, b: 10}, annotations: [],
      coloraxis: {colorscale: "Viridis", colorbar: {title: {text: "norm"}}}};
    const data = pictures.map(({title, norms}, k) => {
      const [x, y] = place(k, rows, columns, 0.2 / columns, 0.2 / rows), [xaxis, yaxis] = ["x" + id(k), "y" + id(k)];
      layout["xaxis" + id(k)] = {domain: x, anchor: yaxis, visible: false, constrain: "domain"};
      layout["yaxis" + id(k)] = {domain: y, anchor: xaxis, visible: false, scaleanchor: xaxis, autorange: "reversed"};
      layout.annotations.push({text: title, showarrow: false, xref: "paper", yref: "paper", x: (x[0] + x[1]) / 2,
        y: y[1], xanchor: "center", yanchor: "bottom", font: {size: 16}});
      return {type: "heatmap", z: norms, coloraxis: "coloraxis", hoverongaps: false, xaxis, yaxis,
        hovertemplate: "row %{y}, column %{x}: %{z:.3g}<extra></extra>"};
    });
    return {data, layout};
  },
};

// plotly.js is in the page, compressed; it draws every figure into its place.
async function draw() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), letter => letter.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
  // Plotly offers to upload the chart unless it is switched off
  const options = {displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: ""};
  for (const figure of document.querySelectorAll("script.figure")) {
    const {data, layout} = DRAWINGS[figure.dataset.for](JSON.parse(figure.textContent));
    await Plotly.newPlot(figure.dataset.for, data, layout, options);
  }
}

// On a narrow screen the panels stand in one column, with the legend below them.
const curves = document.getElementById("curves");
let narrow = false, wide, panels;
function arrange() {
  wide ??= JSON.parse(JSON.stringify(curves.layout));
  panels ??= [...new Set(curves.data.map(line => (line.xaxis || "x").slice(1)))];
  if ((window.innerWidth < 700) === narrow) return;
  narrow = !narrow;
  const n = panels.length, change = {};
  for (const [k, panel] of panels.entries()) {
    change["xaxis" + panel + ".domain"] = narrow ? [0, 1] : wide["xaxis" + panel].domain;
    change["yaxis" + panel + ".domain"] = narrow ? [1 - (k + 0.72) / n, 1 - k / n] : wide["yaxis" + panel].domain;
  }
  const below = {orientation: "h", x: 0, y: -0.12 / n, yanchor: "top", groupclick: "togglegroup"};
  change.legend = narrow ? below : wide.legend;
  change.height = narrow ? 300 * n + 190 : wide.height;
  change["margin.t"] = narrow ? 120 : wide.margin.t;
  for (const [k, menu] of (wide.updatemenus || []).entries()) {
    change["updatemenus[" + k + "].x"] = narrow ? 0 : menu.x;
    change["updatemenus[" + k + "].pad.b"] = narrow ? 12 + 46 * k : menu.pad.b;
  }
  curves.style.height = curves.parentNode.style.height = change.height + "px";
  Plotly.relayout(curves, change);
}
draw().then(() => {
  arrange();
  window.addEventListener("resize", arrange);
});
