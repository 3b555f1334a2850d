// A bundle of `brayx export` on ONNX Runtime for Node.js. Knows nothing of games, doors or Python.
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import ort from "onnxruntime-node";

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int8: Int8Array, uint8: Uint8Array, int16: Int16Array,
  uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array, int64: BigInt64Array, uint64: BigUint64Array,
  bool: Uint8Array,
};

/** A leaf's typed array: little-endian and in C order, as the samples of a bundle are. */
export function arrayOf(leaf, buffer) {
  return new ARRAYS[leaf.dtype](buffer);
}

export class Bundle {
  /**
   * @param {string} folder the folder of bundle.json.
   * @param {string} runtime the file to run: "onnx" or "int8".
   */
  static async load(folder, runtime = "onnx") {
    const about = JSON.parse(await readFile(join(folder, "bundle.json"), "utf8"));
    if (!(runtime in about.files)) throw new Error(`${folder} holds ${Object.keys(about.files)}, not ${runtime}`);
    const session = await ort.InferenceSession.create(join(folder, about.files[runtime]));
    return new Bundle(folder, about, session);
  }

  constructor(folder, about, session) {
    this.folder = folder;
    this.about = about;
    this.session = session;
  }

  /**
   * One forward.
   * @param {Object} inputs typed array by input name, rows one after the other.
   * @param {number} rows the batch.
   * @returns typed array by output name.
   */
  async forward(inputs, rows = 1) {
    const feeds = {};
    for (const leaf of this.about.inputs) {
      // The session has no inputs that the graph does not use.
      if (this.session.inputNames.includes(leaf.name))
        feeds[leaf.name] = new ort.Tensor(leaf.dtype, inputs[leaf.name], [rows, ...leaf.shape]);
    }
    const outputs = await this.session.run(feeds);
    return Object.fromEntries(this.about.outputs.map((leaf) => [leaf.name, outputs[leaf.name].data]));
  }

  /** What a recurrent model's state inputs are when an episode begins, by input name; nothing for others. */
  initialState() {
    const leaves = (this.about.state ?? []).map((pair) => {
      const leaf = this.about.inputs.find((input) => input.name === pair.input);
      const wide = leaf.dtype.endsWith("int64");
      return [pair.input, ARRAYS[leaf.dtype].from(pair.initial, wide ? BigInt : Number)];
    });
    return Object.fromEntries(leaves);
  }

  /** The state inputs of the next forward, from the outputs of this one. */
  nextState(outputs) {
    return Object.fromEntries((this.about.state ?? []).map((pair) => [pair.input, outputs[pair.output]]));
  }

  /** The bundle's samples: `{rows, inputs, outputs}`, typed arrays by name. */
  async samples() {
    const read = async (leaves) =>
      Object.fromEntries(
        await Promise.all(
          leaves.map(async (leaf) => {
            const bytes = await readFile(join(this.folder, leaf.samples));
            return [leaf.name, arrayOf(leaf, bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length))];
          }),
        ),
      );
    const { inputs, outputs, samples } = this.about;
    return { rows: samples.rows, inputs: await read(inputs), outputs: await read(outputs) };
  }
}
