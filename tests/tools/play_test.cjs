// Drives the page to play with in Chromium: node play_test.cjs NODE_MODULES CHROMIUM PROFILE URL [SHOTS] prints what was seen, as JSON.
const { join } = require("node:path");
const [modules, executablePath, profile, url, shots] = process.argv.slice(2);
const { chromium } = require(join(modules, "playwright-core"));
const FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync";
const seen = { wrong: [], requests: new Set() };

/** Wait until the page has answered what it was asked last, and something holds of it. */
async function settled(page, holds = () => true) {
  for (const until = Date.now() + 90000; Date.now() < until; await page.waitForTimeout(20)) {
    if (await page.evaluate(() => asking.began > 0 && !asking.runs && !asking.waits) && await page.evaluate(holds)) return;
  }
  throw new Error(`waited too long for ${holds}; the page says ${await page.textContent("#status")} ${await page.textContent("#errors")}`);
}
const grids = (page) => page.$$eval("#plans article", (all) => all.map((one) => one.querySelector("pre").textContent));
const picture = (page) => page.frames().find((frame) => frame !== page.mainFrame());
const drawn = (page) => picture(page).evaluate(() => data.panels.map(({ name, rows }) => [name, rows.length, data.microbatches]));
const shoot = async (page, name) => shots && page.screenshot({ path: join(shots, `${name}.png`), fullPage: true });

async function look(page) {
  await page.goto(url);
  await settled(page);
  await page.waitForFunction(() => document.getElementById("picture").contentWindow.show);
  seen.first = { grids: await grids(page), words: await page.evaluate(() => shown().map(words)), numbers: await page.$$eval("#numbers tr", (rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent))) };
  seen.drawn = await drawn(page);
  seen.texts = await page.$$eval("#plans article:first-child pre", (all) => all.map((one) => one.textContent));
}

async function play(page) {
  await look(page);
  await shoot(page, "desktop");
  // A key on a slider changes both plans, because the second follows the first.
  await page.getByLabel("First plan: ranks, p, slider").focus();
  await page.keyboard.press("ArrowRight");
  await settled(page, () => document.querySelector("#plans pre").textContent.includes("rank 8"));
  seen.slid = await drawn(page);
  // What is under the pointer is said.
  const canvas = picture(page).locator("#canvas"), box = await canvas.boundingBox();
  await page.mouse.move(box.x + 155, box.y + 45);
  seen.tip = await picture(page).locator("#tip").textContent();
  // Another value of the second plan's is its own, and goes into the link.
  await page.getByLabel("Second plan: microbatches, m", { exact: true }).fill("12");
  await settled(page, () => document.querySelectorAll("#plans pre")[3].textContent.includes("12 microbatches"));
  seen.other = await drawn(page);
  seen.link = await page.evaluate(() => location.hash);
  // A budget that is too small is refused in bpipe's words, and the other plan stays.
  await page.getByLabel("Second plan: of each rank").selectOption("slots");
  await page.getByLabel("Second plan: microbatches", { exact: true }).fill("2");
  await settled(page, () => document.getElementById("errors").textContent.includes("2 slots"));
  seen.refused = { text: await page.textContent("#errors"), drawn: await drawn(page) };
  await shoot(page, "refused");
  // A link brings its settings back.
  await page.evaluate((hash) => { location.hash = hash; }, seen.link);
  await settled(page, () => !document.getElementById("errors").textContent);
  seen.linked = await drawn(page);
  await page.getByLabel("Second plan", { exact: true }).uncheck();
  await settled(page, () => document.querySelectorAll("#plans article").length === 1);
  seen.alone = await drawn(page);
  await page.getByText("Start again").click();
  await settled(page, () => document.querySelectorAll("#plans article").length === 2);
  seen.again = await page.evaluate(() => location.hash);
}

/** How long it takes from a change to the new picture, and how often the page could do something else meanwhile. */
async function time(page, settings) {
  return page.evaluate(async (value) => {
    const began = performance.now();
    location.hash = `#ranks=16&microbatches=64&${value}`;
    let ticks = 0;
    while (asking.runs || asking.began < began) { await new Promise((resolve) => setTimeout(resolve, 5)); ticks++; }
    await new Promise(requestAnimationFrame);
    return { seconds: (performance.now() - began) / 1000, ticks };
  }, settings);
}

(async () => {
  const options = { executablePath, args: FLAGS.split(" "), viewport: { width: 1400, height: 900 } };
  const browser = await chromium.launchPersistentContext(profile, options);
  setTimeout(() => { console.error("took too long", Object.keys(seen)); browser.close().finally(() => process.exit(1)); }, 150000).unref();
  const page = await browser.newPage();
  page.on("pageerror", (error) => seen.wrong.push(`${error}`));
  page.on("console", (message) => message.type() === "error" && seen.wrong.push(message.text()));
  page.on("request", (request) => seen.requests.add(request.url().split(/[:,]/)[0]));
  if (url.startsWith("file:")) {
    await play(page);
    seen.times = { "balanced by count": [], "balanced in bytes": [] };
    for (const forward of ["31ms", "32ms", "33ms"]) {
      seen.times["balanced in bytes"].push(await time(page, `forward=${forward}&2.limit=bytes&2.budget=22GiB`));
      seen.times["balanced by count"].push(await time(page, `forward=${forward}&2.schedule=balanced_1f1b`));
    }
    seen.large = await drawn(page);
    await page.setViewportSize({ width: 390, height: 844 });
    await page.emulateMedia({ colorScheme: "dark" });
    await page.waitForTimeout(300);
    seen.narrow = await page.evaluate(() => [document.scrollingElement.scrollWidth, innerWidth]);
    await shoot(page, "narrow");
  } else await look(page);
  console.log(JSON.stringify({ ...seen, requests: [...seen.requests] }));
  await browser.close();
})().catch((error) => { console.error(error, Object.keys(seen)); process.exit(1); });
