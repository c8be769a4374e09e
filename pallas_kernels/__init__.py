"""The operations that large language models spend their time in, each defined once in plain JAX.

Shapes in this whole project are written with one key:

    T new tokens    B sequences    P pages of a sequence    S context (keys)    R rows read or attended together
    N query heads   K kv heads     G query heads a kv head  H head size
    D model         F feed-forward E experts                V vocabulary        L layers
"""
