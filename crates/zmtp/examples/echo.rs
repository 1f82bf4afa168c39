//! Prints messages received over ZMTP, for tests with other implementations: one line per message, frames in
//! hexadecimal.
//!
//!     echo listen                    as a ROUTER: prints "at ADDRESS", then the identity and the frames of each message
//!     echo subscribe ADDRESS TOPIC   as a SUB: prints the frames of each message
//!     echo ask ADDRESS FRAME...      as a DEALER: sends the frames (hexadecimal, "-" is an empty one), prints answers
use std::error::Error;
use std::io::Write;

use kvlane_zmtp::{Dealer, Listener, ListenerOptions, PeerOptions, Subscriber};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["listen"] => {
            let mut listener = Listener::bind("127.0.0.1:0".parse()?, ListenerOptions::default()).await?;
            say(&format!("at {}", listener.address()))?;
            while let Some(received) = listener.recv().await {
                say(&format!("{} {}", hex(&received.identity), line(&received.frames)))?;
            }
        }
        ["subscribe", address, topic] => {
            let options = PeerOptions::default();
            let mut subscriber = Subscriber::connect(address.parse()?, topic.as_bytes(), options).await?;
            loop {
                say(&line(&subscriber.recv().await?))?;
            }
        }
        ["ask", address, ref frames @ ..] => {
            let frames = frames.iter().map(|frame| unhex(frame)).collect::<Result<Vec<_>, _>>()?;
            let mut dealer =
                Dealer::connect(address.parse()?, Default::default(), PeerOptions::default()).await?;
            dealer.send(&frames).await?;
            loop {
                say(&line(&dealer.recv().await?))?;
            }
        }
        _ => return Err("echo listen | echo subscribe ADDRESS TOPIC | echo ask ADDRESS FRAME...".into()),
    }
    Ok(())
}

fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

fn line<Frame: AsRef<[u8]>>(frames: &[Frame]) -> String {
    frames.iter().map(|frame| hex(frame.as_ref())).collect::<Vec<_>>().join(" ")
}

fn hex(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "-".to_owned();
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    if text == "-" {
        return Ok(Vec::new());
    }
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?)).collect()
}
