//! The replay's engines as servers in real time, and clients that ask a router for a trace's requests: does the real router do
//! what the replay says? `bench/replay/live.py` runs both.
//!
//! ```text
//! live engines PORT COUNT             engines at 127.0.0.1:PORT and the ports behind it
//! live ask URL TRACE SPEED OUT.json   asks for each request of a trace when it is due, and writes what came
//! ```
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a program for developers")]

use std::{
    collections::HashMap,
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::{Method, Request, Response, body::Frame, body::Incoming, client, server, service::service_fn};
use hyper_util::rt::TokioIo;
use kvlane_fleet::{Class, LiveEngine, LiveOutput, Request as Asked};
use serde_json::{Value, json};
use tokio::{net::TcpListener, net::TcpStream, sync::Notify, sync::mpsc, time::sleep_until};

const BLOCK_TOKENS: u64 = 512;
/// As the router counts them.
const TOKEN_BYTES: u64 = 4;
const NAME_BYTES: usize = 16;

type Events = mpsc::UnboundedSender<Bytes>;
/// Where a request's tokens go, and how many there will be.
type Waiting = HashMap<usize, (Events, u64)>;

/// One engine, and who waits for its tokens.
struct Server {
    state: Mutex<(LiveEngine, Waiting)>,
    came: Notify,
    start: Instant,
}

impl Server {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Step after step, for ever.
    async fn run(self: Arc<Self>) {
        loop {
            let begun = self.state.lock().unwrap().0.begin_step(self.now());
            match begun {
                Ok(over) => {
                    sleep_until((self.start + over).into()).await;
                    self.end_step();
                }
                Err(again) => {
                    let later = self.start + again.unwrap_or(Duration::from_secs(3600) + self.now());
                    tokio::select! {
                        () = sleep_until(later.into()) => {}
                        () = self.came.notified() => {}
                    }
                }
            }
        }
    }

    fn end_step(&self) {
        let (engine, waiting) = &mut *self.state.lock().unwrap();
        for brought in engine.end_step() {
            match brought {
                LiveOutput::First(number) => {
                    if let Some((events, _)) = waiting.get(&number) {
                        let _ = events.send(tokens(1));
                    }
                }
                LiveOutput::Last(number) => {
                    if let Some((events, output)) = waiting.remove(&number) {
                        // Those between are not sent one by one: nobody looks at them here.
                        let _ = events.send(tokens(output.saturating_sub(1)));
                        let _ = events.send(Bytes::from_static(b"data: [DONE]\n\n"));
                    }
                }
            }
        }
    }

    fn complete(&self, body: &Value) -> mpsc::UnboundedReceiver<Bytes> {
        let prompt = body["prompt"].as_str().unwrap_or_default().as_bytes();
        let block = (BLOCK_TOKENS * TOKEN_BYTES) as usize;
        let name = |block: &[u8]| {
            let name = std::str::from_utf8(block.get(..NAME_BYTES)?).ok()?;
            u64::from_str_radix(name, 16).ok()
        };
        let output_tokens = body["max_tokens"].as_u64().unwrap_or(1).max(1);
        let request = Asked {
            at: Duration::ZERO,
            prompt_tokens: (prompt.len() as u64 / TOKEN_BYTES).max(1),
            output_tokens,
            blocks: prompt.chunks(block).filter_map(name).collect(),
        };
        let (events, answer) = mpsc::unbounded_channel();
        let (engine, waiting) = &mut *self.state.lock().unwrap();
        let number = engine.push(request);
        waiting.insert(number, (events, output_tokens));
        self.came.notify_one();
        answer
    }

    fn metrics(&self) -> String {
        let (running, waits, percent) = self.state.lock().unwrap().0.load();
        let used = percent as f64 / 100.0;
        format!(
            "vllm:num_requests_running {running}\nvllm:num_requests_waiting {waits}\nvllm:kv_cache_usage_perc {used}\n"
        )
    }
}

fn tokens(count: u64) -> Bytes {
    "data: {\"choices\": [{\"text\": \"a\"}]}\n\n".repeat(count as usize).into()
}

async fn answer(
    server: Arc<Server>,
    request: Request<Incoming>,
) -> Result<Response<BoxBody<Bytes, Infallible>>, hyper::Error> {
    let whole = |text: String| Full::new(Bytes::from(text)).boxed();
    let body = match (request.method(), request.uri().path()) {
        (&Method::GET, "/v1/models") => {
            whole(json!({ "data": [{ "id": "m", "object": "model" }] }).to_string())
        }
        (&Method::GET, "/metrics") => whole(server.metrics()),
        (&Method::POST, _) => {
            let body = request.into_body().collect().await?.to_bytes();
            Streamed(server.complete(&serde_json::from_slice(&body).unwrap_or_default())).boxed()
        }
        _ => whole(String::new()),
    };
    Ok(Response::new(body))
}

/// An answer whose pieces come one by one.
struct Streamed(mpsc::UnboundedReceiver<Bytes>);

impl hyper::body::Body for Streamed {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}

async fn engines(port: u16, count: u16) {
    for port in port..port + count {
        let engine = LiveEngine::new(Class::default(), BLOCK_TOKENS, None);
        let state = Mutex::new((engine, HashMap::new()));
        let server = Arc::new(Server { state, came: Notify::new(), start: Instant::now() });
        tokio::spawn(Arc::clone(&server).run());
        let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], port))).await.unwrap();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let server = Arc::clone(&server);
                let service = service_fn(move |request| answer(Arc::clone(&server), request));
                tokio::spawn(async move {
                    let _ = server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
    }
    eprintln!("ready");
    std::future::pending::<()>().await;
}

struct Due {
    at: Duration,
    body: String,
}

fn read(trace: &str, speed: f64) -> Vec<Due> {
    let text = std::fs::read_to_string(trace).unwrap();
    let number = |row: &Value, name: &str| row[name].as_u64().unwrap();
    text.lines()
        .map(|line| {
            let row: Value = serde_json::from_str(line).unwrap();
            let mut left = (number(&row, "input_length") * TOKEN_BYTES) as usize;
            let mut prompt = String::with_capacity(left);
            for block in row["hash_ids"].as_array().unwrap() {
                let bytes = left.min((BLOCK_TOKENS * TOKEN_BYTES) as usize);
                let name = format!("{:016x}", block.as_u64().unwrap());
                prompt.push_str(&name.repeat(bytes.div_ceil(NAME_BYTES))[..bytes]);
                left -= bytes;
            }
            let output = number(&row, "output_length").max(1);
            let body = json!({ "model": "m", "prompt": prompt, "max_tokens": output, "stream": true });
            let at = Duration::from_secs_f64(number(&row, "timestamp") as f64 / 1e3 / speed);
            Due { at, body: body.to_string() }
        })
        .collect()
}

/// Seconds to the first byte and to the last; none where it failed.
async fn ask(authority: &str, body: String) -> Option<(f64, f64)> {
    let began = Instant::now();
    let stream = TcpStream::connect(authority).await.ok()?;
    let (mut sender, connection) = client::conn::http1::handshake(TokioIo::new(stream)).await.ok()?;
    tokio::spawn(connection);
    let request = Request::post("/v1/completions")
        .header("host", authority)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body)))
        .ok()?;
    let response = sender.send_request(request).await.ok()?;
    if !response.status().is_success() {
        return None;
    }
    let mut body = response.into_body();
    body.frame().await?.ok()?;
    let first = began.elapsed().as_secs_f64();
    while let Some(frame) = body.frame().await {
        frame.ok()?;
    }
    Some((first, began.elapsed().as_secs_f64()))
}

async fn ask_all(authority: String, trace: &str, speed: f64, out: &str) {
    let due = read(trace, speed);
    let start = Instant::now() + Duration::from_secs(1);
    let mut asked = Vec::new();
    let mut late = Duration::ZERO;
    for Due { at, body } in due {
        sleep_until((start + at).into()).await;
        late = late.max((start + at).elapsed());
        let authority = authority.clone();
        asked.push(tokio::spawn(async move { ask(&authority, body).await }));
    }
    let mut rows = Vec::new();
    for task in asked {
        let served = task.await.unwrap();
        rows.push(served.map_or(Value::Null, |(first, last)| json!([first, last])));
    }
    let report = json!({ "served": rows, "sent_late_at_most_s": late.as_secs_f64() });
    std::fs::write(out, report.to_string()).unwrap();
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    match words[..] {
        ["engines", port, count] => runtime.block_on(engines(port.parse().unwrap(), count.parse().unwrap())),
        ["ask", url, trace, speed, out] => {
            let authority = url.trim_start_matches("http://").to_owned();
            runtime.block_on(ask_all(authority, trace, speed.parse().unwrap(), out));
        }
        _ => eprintln!("live engines PORT COUNT | live ask URL TRACE SPEED OUT.json"),
    }
}
