"""The HTTP proxy of `benchmarks.paths`: connects as it is asked to. `python _paths_proxy.py HOST PORT`."""

import asyncio
import sys


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    host, _, port = (await reader.readuntil(b"\r\n\r\n")).decode().split()[1].rpartition(":")
    try:
        onward_reader, onward_writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), 5)
    except (OSError, TimeoutError):
        writer.write(b"HTTP/1.1 504 Gateway Timeout\r\n\r\n")
        writer.close()
        return
    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
    await asyncio.gather(copy(reader, onward_writer), copy(onward_reader, writer))


async def main(host: str, port: int) -> None:
    server = await asyncio.start_server(serve, host, port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
