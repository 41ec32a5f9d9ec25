// Draws the diagrams of a page, where Mermaid is there: Material would fetch it from the network.
document$.subscribe(() => {
  if (typeof mermaid === "undefined") return;
  const dark = document.body.dataset.mdColorScheme === "slate";
  mermaid.initialize({ startOnLoad: false, theme: dark ? "dark" : "neutral" });
  for (const code of document.querySelectorAll("pre.diagram > code")) {
    const drawn = document.createElement("div");
    drawn.className = "mermaid";
    drawn.textContent = code.textContent;
    code.parentElement.replaceWith(drawn);
  }
  mermaid.run();
});
