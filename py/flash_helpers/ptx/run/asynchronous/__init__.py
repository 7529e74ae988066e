"""Units that work beside the threads: cp.async, TMA, `wgmma`, and the barriers that count them."""
