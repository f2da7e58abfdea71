// The report: draws each chart when it comes near the screen, follows select boxes and the theme.

async function startReport() {
  if (!checkBrowser()) return;
  const charts = readJson("charts");
  const shown = {};  // group: index of the traces on view
  await loadLibrary();

  function draw(element) {
    if (element.dataset.drawn) return;
    element.dataset.drawn = "1";
    const chart = charts[element.dataset.chart];
    const layout = withChanges(chart.layout, themeOf(chart.layout));
    const data = chart.group ? chart.data.map((t, i) => ({ ...t, visible: i === (shown[chart.group] ?? 0) })) : chart.data;
    Plotly.newPlot(element, data, layout, chartConfig);
  }

  const elements = [...document.querySelectorAll(".chart")];
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        observer.unobserve(entry.target);
        draw(entry.target);
      }
    }
  }, { rootMargin: "400px" });
  elements.forEach((element) => observer.observe(element));
  window.addEventListener("beforeprint", () => elements.forEach(draw));

  document.addEventListener("theme", () => {
    for (const element of elements) {
      if (element.dataset.drawn) Plotly.relayout(element, themeOf(element.layout));
    }
  });

  for (const select of document.querySelectorAll("select[data-group]")) {
    const choose = () => {
      shown[select.dataset.group] = select.selectedIndex;
      for (const element of elements) {
        const chart = charts[element.dataset.chart];
        if (element.dataset.drawn && chart.group === select.dataset.group) {
          Plotly.restyle(element, { visible: chart.data.map((_, i) => i === select.selectedIndex) });
        }
      }
    };
    select.addEventListener("change", choose);
    shown[select.dataset.group] = select.selectedIndex;
  }
  document.documentElement.dataset.ready = "1";
}

startReport().catch((error) => fail("The page could not be drawn: " + error.message));
