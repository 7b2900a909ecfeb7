"""What benchmarks and tests stand on, and no verb of weft does: machines on lines of their own, peers without work.

floods              who holds a ticket and floods a member, each attack by itself
namespaces          machines that are network namespaces of this one
real                real processes, befallen by the faults of a scenario
seats               members without training, by the hundred, on a virtual clock
stages              peers of a pipeline that take the seconds of a script; placement, a fluid model of them
square_cube         how busy a machine is that holds some layers of a width, over a line
"""
