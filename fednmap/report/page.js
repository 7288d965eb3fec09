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
    const {data, layout} = JSON.parse(figure.textContent);
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
  for (const [k, id] of panels.entries()) {
    change["xaxis" + id + ".domain"] = narrow ? [0, 1] : wide["xaxis" + id].domain;
    change["yaxis" + id + ".domain"] = narrow ? [1 - (k + 0.72) / n, 1 - k / n] : wide["yaxis" + id].domain;
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
