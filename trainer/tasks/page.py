"""The page of the server: one file, which loads nothing from anywhere else. Torch-free."""

from __future__ import annotations

# Scripts and styles inside of the page run; nothing is loaded, and no other page can contain it.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>gptctl serve</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 48rem; margin: auto; padding: 1rem; }
  textarea { width: 100%; box-sizing: border-box; font: inherit; padding: .5rem; }
  fieldset { border: 0; padding: 0; margin: .5rem 0; display: flex; flex-wrap: wrap; gap: 1rem; }
  input { width: 6rem; font: inherit; }
  input[type=password] { width: 12rem; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #8888; padding: .75rem;
        min-height: 6rem; }
  .prompt { opacity: .6; }
  .error { color: #b00020; }
</style>
</head>
<body>
<h1 id="name">gptctl serve</h1>
<form id="form">
  <label>Prompt <textarea id="prompt" rows="4" autofocus></textarea></label>
  <fieldset>
    <label>max tokens <input id="max_tokens" type="number" min="1"></label>
    <label>temperature <input id="temperature" type="number" min="0" max="100" step="0.1"></label>
    <label>top p <input id="top_p" type="number" min="0" max="1" step="0.05"></label>
    <label>top k <input id="top_k" type="number" min="0"></label>
    <label>seed <input id="seed" type="number" min="0"></label>
    <label>token <input id="token" type="password" autocomplete="off"></label>
  </fieldset>
  <button id="send">Complete</button> <button id="stop" type="button" disabled>Stop</button>
</form>
<pre id="text" aria-live="polite"></pre>
<script>
const $ = id => document.getElementById(id);
let controller = null;
const headers = () => {
  const token = $("token").value;
  return {"Content-Type": "application/json", ...(token ? {Authorization: "Bearer " + token} : {})};
};
fetch("v1/models", {headers: headers()}).then(r => r.json())
  .then(models => { if (models.data) $("name").textContent = models.data[0].id; }).catch(() => {});
const show = (text, kind) => {
  const span = document.createElement("span");
  span.className = kind; span.textContent = text;
  $("text").append(span);
};
$("stop").onclick = () => controller && controller.abort();
$("form").onsubmit = async event => {
  event.preventDefault();
  const body = {prompt: $("prompt").value, stream: true};
  for (const key of ["max_tokens", "temperature", "top_p", "top_k", "seed"])
    if ($(key).value !== "") body[key] = Number($(key).value);
  $("text").textContent = ""; show(body.prompt, "prompt");
  controller = new AbortController(); $("send").disabled = true; $("stop").disabled = false;
  try {
    const reply = await fetch("v1/completions",
      {method: "POST", headers: headers(), body: JSON.stringify(body), signal: controller.signal});
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const {value, done} = await reader.read();
      if (done) break;
      const events = (rest + value).split("\\n\\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") continue;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new Error(parsed.error.message);
        for (const choice of parsed.choices) show(choice.text, "");
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") show("\\n" + error.message, "error");
  }
  $("send").disabled = false; $("stop").disabled = true;
};
</script>
</body>
</html>
"""
