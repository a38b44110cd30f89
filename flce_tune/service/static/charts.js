// Draws the charts of a page: each figure holds a Vega-Lite specification as JSON.
"use strict";

const NARROW = 470; // px; charts are made for more

function fitted(spec, room) {
  if (room >= NARROW) return spec;
  if (spec.hconcat) {
    const { hconcat, ...rest } = spec;
    return { ...rest, vconcat: hconcat };
  }
  return { ...spec, width: room, autosize: { type: "fit-x", contains: "padding" } };
}

async function draw(figure) {
  const target = figure.querySelector("[data-chart]");
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const style = getComputedStyle(figure);
  const room = figure.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  await vegaEmbed(target, fitted(spec, room), {
    actions: false,
    ast: true, // no eval, which the page's policy forbids
    defaultStyle: false,
    renderer: "svg",
    tooltip: { disableDefaultStyle: true },
    config: {
      font: "system-ui, sans-serif",
      title: { anchor: "start", frame: "bounds" },
      legend: { orient: "top", columns: room < NARROW ? 2 : 4 },
    },
  });
  figure.dataset.drawn = "";
}

document.querySelectorAll("figure.chart").forEach((figure) => {
  draw(figure).catch((error) => {
    figure.querySelector("[data-chart]").textContent = "This chart cannot be drawn.";
    console.error(error);
  });
});
