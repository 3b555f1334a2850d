// `node check.js FOLDER [RUNTIME]`: runs a bundle's samples, in one batch and row by row, and prints as JSON the largest
// error of each output against torch. For a recurrent model also the first output rows of a session.
import { Bundle } from "./bundle.js";

const [folder, runtime] = process.argv.slice(2);
const bundle = await Bundle.load(folder, runtime);
const { rows, inputs, outputs } = await bundle.samples();
const worst = {};

function compare(got, start, count) {
  for (const leaf of bundle.about.outputs) {
    const size = leaf.shape.reduce((a, b) => a * b, 1);
    const want = outputs[leaf.name].subarray(start * size, (start + count) * size);
    if (got[leaf.name].length !== want.length) throw new Error(`${leaf.name}: ${got[leaf.name].length} values`);
    for (let i = 0; i < want.length; i++) {
      const error = Math.abs(Number(got[leaf.name][i]) - Number(want[i]));
      if (!(error <= (worst[leaf.name] ?? 0))) worst[leaf.name] = error;
    }
    worst[leaf.name] ??= 0;
  }
}

compare(await bundle.forward(inputs, rows), 0, rows);
for (let row = 0; row < rows; row++) {
  const one = bundle.about.inputs.map((leaf) => {
    const size = leaf.shape.reduce((a, b) => a * b, 1);
    return [leaf.name, inputs[leaf.name].slice(row * size, (row + 1) * size)];
  });
  compare(await bundle.forward(Object.fromEntries(one)), row, 1);
}

// A session of a recurrent model: repeats the first sample's observation, and keeps the state.
const session = [];
if (bundle.about.state) {
  const first = bundle.about.inputs.map((leaf) => [
    leaf.name,
    inputs[leaf.name].slice(0, leaf.shape.reduce((a, b) => a * b, 1)),
  ]);
  let state = bundle.initialState();
  for (let step = 0; step < 3; step++) {
    const got = await bundle.forward({ ...Object.fromEntries(first), ...state });
    session.push(Object.fromEntries(Object.entries(got).map(([name, values]) => [name, Array.from(values, Number)])));
    state = bundle.nextState(got);
  }
}
console.log(JSON.stringify({ rows, worst, session }));
