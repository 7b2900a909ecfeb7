"""Inner steps on a device: what is asked of whatever trains (`learner`), and what trains here (`trainer`, `section`).

`device` chooses where and in which precision, and says whether a run fits. It knows no peers, no rounds, no sockets.
"""
