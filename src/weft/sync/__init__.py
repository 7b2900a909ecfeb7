"""The distributed algorithms: methods, exact outer steps, merging in parts, and the round that agrees on them.

    method/        what a method is: choices, and the presets that name them
    records/       what is signed and sent
    merge/         exact arithmetic: encode, reduce, mean, outer steps
    governance     what signed records come to
    round/         the round as a pure machine

No file here knows sockets, clocks or disks: time and bytes are handed in.
"""
