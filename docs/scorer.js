// Sphinx's own weights, but a chapter's title or heading that holds the query outweighs words and names.
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([page, , , , score, , kind]) => kind === 'title' && page !== 'theorems' ? 6*score : score,
};
