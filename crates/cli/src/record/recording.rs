//! Reads a recorder until the time is over, and writes its requests.

use std::{
    io::Write,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use kvlane_trace::file::Header;
use tokio::signal::unix::{SignalKind, signal};

use super::trace_writer::TraceWriter;
use crate::span::Span;

/// Pause between two reads. The recorder keeps 4,096 requests meanwhile.
const INTERVAL: Duration = Duration::from_millis(250);
/// Pause between two writes of the header.
const HEADER_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(crate) struct FileArgs {
    /// The file to write
    file: PathBuf,
    /// How long to record: 90s, 10m, 1h, 2d [default: until Ctrl-C]
    #[arg(long = "for", value_name = "TIME", allow_hyphen_values = true)]
    span: Option<Span>,
    /// Write the names of engines and models too. Without it the file has numbers
    #[arg(long)]
    names: bool,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
}

/// A recorder to read.
pub(super) trait Source {
    /// Reads all there is, and writes what is wanted. False if the recorder does not answer: it is tried again at the next read.
    /// `is_last` also closes requests that have not ended.
    fn read(&mut self, writer: &mut TraceWriter, is_last: bool) -> Result<bool>;
    /// The sentence for a file without a request.
    fn nothing_came(&self) -> &'static str;
    /// The sentence that says how to go on.
    fn next(&self, file: &str) -> String;
}

/// Records until the time is over, or a signal comes.
pub(super) fn record(
    args: &FileArgs,
    header: Header,
    since: Duration,
    source: &mut dyn Source,
) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Before there is a file, so that a signal leaves none that is cut off.
    let (mut term, mut interrupt, mut hangup) = {
        let _inside = runtime.enter();
        let take = |kind| signal(kind);
        (take(SignalKind::terminate())?, take(SignalKind::interrupt())?, take(SignalKind::hangup())?)
    };
    let mut writer = TraceWriter::create(&args.file, header, since, args.force)?.with_names(args.names);
    let bar = progress_bar(args.span);
    let begun = Instant::now();
    let deadline = args.span.map(|Span(span)| begun + span);
    let mut header_at = begun + HEADER_INTERVAL;
    loop {
        let now = Instant::now();
        let pause =
            deadline.map_or(INTERVAL, |deadline| deadline.saturating_duration_since(now).min(INTERVAL));
        let was_stopped = runtime.block_on(async {
            tokio::select! {
                () = tokio::time::sleep(pause) => false,
                _ = term.recv() => true,
                _ = interrupt.recv() => true,
                _ = hangup.recv() => true,
            }
        });
        let now = Instant::now();
        let is_last = was_stopped || deadline.is_some_and(|deadline| now >= deadline);
        let was_read = source.read(&mut writer, is_last)?;
        writer.header().seconds = now.duration_since(begun).as_secs_f64();
        if now >= header_at || is_last {
            writer.header().is_complete = is_last && was_read;
            writer.flush()?;
            header_at = now + HEADER_INTERVAL;
        }
        bar.set_position(now.duration_since(begun).as_secs());
        bar.set_message(writer.progress());
        if is_last {
            break;
        }
    }
    bar.finish_and_clear();
    let file = args.file.display().to_string();
    let mut text = format!("{file}: {}\n", writer.progress());
    if !writer.header().is_complete {
        text.push_str("the last requests are missing, because nothing answered at the end\n");
    }
    match writer.header().requests {
        0 => text.push_str(source.nothing_came()),
        _ => text.push_str(&source.next(&file)),
    }
    // The reader of a pipe may have left.
    let _ = writeln!(std::io::stdout(), "{text}");
    Ok(())
}

/// Shows on a terminal how far the recording is.
fn progress_bar(span: Option<Span>) -> ProgressBar {
    let (bar, style) = match span {
        Some(Span(span)) => {
            (ProgressBar::new(span.as_secs()), "recording [{bar:30}] {elapsed} of {len} s: {msg}")
        }
        None => (ProgressBar::new_spinner(), "recording for {elapsed}, until Ctrl-C: {msg}"),
    };
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
