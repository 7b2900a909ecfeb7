"""The network: ordered encrypted streams to verified peers, and what every algorithm above needs of them.

    transport/    a way to reach peers: memory, tls, iroh
    link/         connections that stand: dialled, accepted, shaken hands on, calls and notes over them
    blobs/        bytes by digest
    membership/   who is alive
    node          the front: links, typed calls and notes, blobs
    lan           how members in one local network find each other, where they ask for it
    ticket        the string that lets a machine join; `admission` decides who may

It does not know rounds, models or data.
"""
