//! Relays bytes between clients and engines, one connection for each, without parsing them. `bench/route_peers.py --relay`
//! measures this cost beside the routers.
//!
//!     cargo run --release -p kvlane-router --example relay -- 127.0.0.1:8000 127.0.0.1:8100 127.0.0.1:8200

use std::io;

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
};

fn main() -> io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let listen = arguments.next().ok_or_else(|| io::Error::other("give the address to listen on"))?;
    let engines: Vec<String> = arguments.collect();
    if engines.is_empty() {
        return Err(io::Error::other("give addresses of engines"));
    }
    // One thread, as `bench/route_peers.py` gives to `kvlane route`.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind(listen).await?;
        for engine in engines.iter().cycle() {
            let (mut client, _) = listener.accept().await?;
            let engine = engine.clone();
            tokio::spawn(async move {
                client.set_nodelay(true)?;
                let mut upstream = TcpStream::connect(engine).await?;
                upstream.set_nodelay(true)?;
                copy_bidirectional(&mut client, &mut upstream).await
            });
        }
        Ok(())
    })
}
