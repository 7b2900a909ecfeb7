"""What shows anybody that somebody signed what is not so: put together by who has found it.

proving      evidence of works, parts and steps, from what an audit has at hand
operations   evidence of gradients: a list of operations, shown by who made the step and made again by who doubts it
"""
