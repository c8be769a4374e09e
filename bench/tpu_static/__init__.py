"""Static cost of TPU kernels: compile ahead of time, parse the final schedule, execute its scalar side, keep time.

One cycle a bundle, matrix-unit occupancy, DMA latency and bandwidth. The clock and memory numbers are
published figures and the cycle counts are the compiler's schedule: nothing is measured on hardware. It cannot know
contention between cores, HBM refresh and bank effects, or clock changes.
"""
