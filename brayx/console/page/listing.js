// A `Listing`: a table of rows, or their cards on a phone. Slots of NiceGUI would make a new component for each update
// of a page, which replaces all rows: the one that the viewer is about to press, and its focus, would go.
import { h, resolveComponent, withCtx } from "vue";

const ACTIONS = `
  <q-btn v-for="action in props.row.actions" :key="action.name" outline dense no-caps class="brayx-action"
    :label="action.label" v-bind="action.href ? {href: action.href} : {}"
    @click="action.href || $emit('action', props.key, action.name)" />`;
const BOX = `<q-checkbox v-model="props.selected" dense class="brayx-action" />`;

/** A row, which the link in its first cell covers. */
const Row = {
  props: ["props"],
  emits: ["action"],
  template: `
    <q-tr :props="props">
      <q-td v-if="props.row.choice" auto-width>${BOX}</q-td>
      <q-td v-for="(col, place) in props.cols.filter(col => col.name)" :key="col.name" :props="props"
        :title="props.row.full[col.name]">
        <a v-if="place === 0 && props.row.href" class="brayx-row" :href="props.row.href">{{ col.value }}</a>
        <template v-else>{{ col.value }}</template>
      </q-td>
      <q-td v-if="props.row.actions.length" class="brayx-actions">${ACTIONS}</q-td>
    </q-tr>`,
};

/** The same on a phone. */
const Card = {
  props: ["props"],
  emits: ["action"],
  template: `
    <div class="brayx-card w-full">
      <div style="display: flex; justify-content: space-between; gap: 8px; font-weight: 600">
        <span>
          <template v-if="props.row.choice">${BOX}</template>
          <a v-if="props.row.href" class="brayx-row" :href="props.row.href">{{ props.cols[0].value }}</a>
          <template v-else>{{ props.cols[0].value }}</template>
        </span>
        <span>{{ props.cols.filter(col => col.name === props.row.lead).map(col => col.value)[0] }}</span>
      </div>
      <div style="display: flex; flex-wrap: wrap; column-gap: 14px; font-size: 13px">
        <span v-for="col in props.cols.slice(1).filter(col => col.name && col.name !== props.row.lead)" :key="col.name">
          <span style="opacity: 0.65">{{ col.label }}</span> {{ col.value }}
        </span>
      </div>
      ${ACTIONS}
    </div>`,
};

/** The order of two rows by a column; those without a number come first. */
const order = (name) => (a, b, { by: { [name]: x } }, { by: { [name]: y } }) =>
  x === y ? 0 : x === null || (y !== null && x < y) ? -1 : 1;

export default {
  props: { columns: Array },
  emits: ["action"],
  render() {
    const columns = this.columns.map((column) => ({ ...column, sort: column.sortable ? order(column.name) : () => 0 }));
    // withCtx, so that Vue does not wrap each row: then rows are told apart by their keys, and stay when others come.
    const part = (Part) =>
      withCtx((props) => h(Part, { key: props.key, props, onAction: (...action) => this.$emit("action", ...action) }));
    return h(resolveComponent("q-table"), { columns }, { body: part(Row), item: part(Card) });
  },
};
