const [url = "http://127.0.0.1:8000", games = 1000] = process.argv.slice(2);
const contract = {
  contract: 1,
  observations: { walk: { shape: [2], labels: ["place", "goal"] } },
  actions: { move: { kind: "discrete", size: 2, labels: ["left", "right"] } },
};

async function step(session, kind, body) {
  const headers = { session, "step-kind": kind };
  const response = await fetch(`${url}/step`, { method: "POST", headers, body: JSON.stringify(body) });
  const reply = await response.text();
  if (!response.ok) throw new Error(reply);
  return reply;
}

let sum = 0;
for (let game = 1; game <= games; game++) {
  const session = crypto.randomUUID();
  await step(session, "start", contract);
  let place = Math.random() * 2 - 1;
  const goal = Math.random() * 2 - 1;
  let reward = 0;
  let ticks = 0;
  while (reward < 1 && ticks < 40) {
    const { move } = JSON.parse(await step(session, "tick", { obs: [place, goal], reward }));
    place += move === 1 ? 0.1 : -0.1;
    reward = Math.abs(place - goal) < 0.1 ? 1 : -0.02;
    sum += reward;
    ticks++;
  }
  const end = reward === 1 ? { terminated: true } : { truncated: true };
  await step(session, "stop", { obs: [place, goal], reward, ...end });
  if (game % 100 === 0 || game === Number(games)) {
    console.log(`${game} games, mean reward ${(sum / ((game - 1) % 100 + 1)).toFixed(2)}`);
    sum = 0;
  }
}
