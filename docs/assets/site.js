"use strict";
// The button of the theme goes round auto, light and dark. The views of the steps know light and dark
// only: auto is told by leaving nothing behind. The click gets here after the button's own handler.
document.addEventListener("click", (event) => {
  if (event.target.closest(".theme-toggle") && localStorage.getItem("theme") === "auto") {
    localStorage.removeItem("theme");
  }
});
