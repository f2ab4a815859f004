"""Models that generate nothing: of a text they make a vector or the probabilities of labels, of a pair a score.

engine takes a caller's texts, or a Request with `pooling`; the step loop is that of engine.execution
scheduler orders texts by tier and tenant, and fills each step up to a budget of tokens; there is no KV cache
runner computes a step's texts as one ragged batch, and makes a row of each text's rows (engine.text.pooling)
"""

from engine.pooling.engine import PoolingEngine

__all__ = ["PoolingEngine"]
