"use strict";
// Draws the charts in the reader's theme, and again when the theme or the width changes.
(() => {
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const button = document.querySelector(".theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

  const config = () => {
    const ink = getComputedStyle(root).getPropertyValue("--ink").trim();
    const soft = getComputedStyle(root).getPropertyValue("--soft").trim();
    const line = getComputedStyle(root).getPropertyValue("--line").trim();
    // The lower end is no wait, and still a cell that stands out from the page.
    const heat = isDark() ? ["#586676", "#b8743f", "#ffc184"] : ["#d9c3ae", "#e59350", "#a8480a"];
    return {
      background: "transparent",
      font: "system-ui, sans-serif",
      view: { stroke: null },
      axis: { labelColor: soft, titleColor: soft, gridColor: line, domainColor: line, tickColor: line, titleFontWeight: 500 },
      legend: {
        labelColor: ink, titleColor: soft, titleFontWeight: 500, symbolType: "square",
        columns: document.body.clientWidth < 600 ? 2 : 4,
      },
      text: { color: ink },
      range: { heatmap: heat, ramp: heat },
    };
  };

  const draw = async () => {
    for (const [name, spec] of Object.entries(specs)) {
      const place = document.getElementById(`chart-${name}`);
      await window.vegaEmbed(place, spec, { actions: false, renderer: "svg", config: config() });
      place.dataset.drawn = isDark() ? "dark" : "light";
    }
    document.body.dataset.ready = "yes";
  };

  const label = () => { button.textContent = isDark() ? "light" : "dark"; };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    label();
    draw();
  });
  system.addEventListener("change", () => { label(); draw(); });
  let narrow = document.body.clientWidth < 600;
  window.addEventListener("resize", () => {
    if (narrow !== document.body.clientWidth < 600) { narrow = !narrow; draw(); }
  });
  label();
  draw();
})();
