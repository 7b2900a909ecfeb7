"""The network: ordered encrypted streams to verified peers, and what every algorithm above needs of them.

    transport   the protocol of a way to reach peers: memory, tls, iroh
    frame       records one after the other on a stream
    node        the room's front door: links, typed calls and notes, blobs by digest
    ticket      the string that lets a machine join; admission decides who may
    membership  who is alive (pure); heartbeat runs it on a node

A node is built of small parts, each ignorant of the next: dial and door make links after a handshake, a link runs an
rpc session, bulk keeps streams for blobs. It does not know rounds, models or data.
"""
