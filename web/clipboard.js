// Copies text, also where a page has no clipboard.

/** Whether the text is in the clipboard now. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyThroughSelection(text);
  }
}

/** For pages that are neither https nor localhost, such as ComfyUI on another machine: they have no clipboard. */
function copyThroughSelection(text) {
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}
