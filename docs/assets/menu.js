"use strict";
// Loaded right below the menu, before anything is seen of it: folds the parts that the page is not in
// (a page outside of all parts leaves the first one open), and scrolls to the entry of the page.
{
  const parts = [...document.querySelectorAll(".sidebar-tree details")];
  const entry = document.querySelector(".sidebar-tree .current-page");
  const own = entry?.closest("details") ?? parts[0];
  for (const part of parts) part.open = part === own;
  if (entry) {
    const view = document.querySelector(".sidebar-scroll");
    const above = entry.getBoundingClientRect().top - view.getBoundingClientRect().top;
    view.scrollTo({ top: above - view.clientHeight / 2, behavior: "instant" });
  }
}
