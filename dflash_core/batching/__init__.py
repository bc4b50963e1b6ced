"""Batch plans: which samples run together, and when. Pure functions of sequence lengths; no torch.

Vocabulary, in the order of the work:

- Cut: the division of an epoch's samples into microbatches (`cutting`, `packing`), by the rule that a
  strategy describes (`strategies`).
- Microbatch: the samples of one forward, padded to one width or packed end to end, in at most `token_budget`
  slots.
- Step (`ordering`): consecutive microbatches that share one optimizer update; it closes at `tokens_per_step`
  real tokens.
- Plan (`plan`): the microbatches and steps of one epoch in execution order, the same at any world size; each
  rank computes its part of a step from it.

Nothing is re-exported: `dflash_core.config` reads `strategies` and must stay free of numba.
"""
