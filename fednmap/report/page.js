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

// On a narrow screen the panels stand in one column, with the legend below them.
const curves = document.getElementById("curves");
const wide = JSON.parse(JSON.stringify(curves.layout));
const panels = [...new Set(curves.data.map(line => (line.xaxis || "x").slice(1)))];
let narrow = false;
function arrange() {
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
arrange();
window.addEventListener("resize", arrange);
