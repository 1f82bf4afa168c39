//! Writes a trace file while it is recorded.

use std::{
    collections::HashMap,
    fs::{File, OpenOptions},
    io::{BufWriter, ErrorKind, Seek, SeekFrom, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use kvlane_trace::{
    Recorded,
    file::{Header, ModelLine, RequestLine},
};

/// A trace file. Its header is written again as it grows, so that it is true even if the recording is cut off.
pub(super) struct TraceWriter {
    path: PathBuf,
    file: BufWriter<File>,
    header: Header,
    /// When the recording began, on the recorder's clock.
    since: Duration,
    with_names: bool,
    models: HashMap<[u8; 16], u32>,
    engines: HashMap<String, u32>,
    /// Added to the recorder's numbers: those of a recorder that was started again begin at 0 again.
    first_id: u64,
    /// The first number that the file does not have.
    next_id: u64,
    /// Looked-up blocks and hits.
    blocks: (u64, u64),
    bytes: u64,
}

/// A model as the recorder describes it.
pub(super) struct ModelFacts {
    pub(super) namespace: [u8; 16],
    pub(super) name: String,
    pub(super) tokens_per_block: u32,
    pub(super) block_bytes: u64,
}

impl TraceWriter {
    /// Makes the file. An existing one is an error, unless it may be replaced.
    pub(super) fn create(path: &Path, header: Header, since: Duration, may_replace: bool) -> Result<Self> {
        let mut options = OpenOptions::new();
        // The file is this user's: with --names it tells who runs what.
        options.write(true).create(true).truncate(true).mode(0o600);
        if !may_replace {
            options.create_new(true);
        }
        let file = options.open(path).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => {
                anyhow!("{} exists: name another file, or replace it with --force", path.display())
            }
            _ => anyhow!("{}: {error}", path.display()),
        })?;
        if !file.metadata().is_ok_and(|facts| facts.is_file()) {
            bail!("{} is no file: the header is written again as the recording goes on", path.display());
        }
        let mut writer = Self {
            path: path.to_owned(),
            file: BufWriter::new(file),
            header,
            since,
            with_names: false,
            models: HashMap::new(),
            engines: HashMap::new(),
            first_id: 0,
            next_id: 0,
            blocks: (0, 0),
            bytes: 0,
        };
        let line = writer.header.to_line();
        writer.write(&line)?;
        writer.flush()?;
        Ok(writer)
    }

    /// The file also has the engines' and models' names.
    pub(super) fn with_names(mut self, with_names: bool) -> Self {
        self.with_names = with_names;
        self
    }

    /// The header to change; [`flush`](Self::flush) writes it.
    pub(super) fn header(&mut self) -> &mut Header {
        &mut self.header
    }

    /// Numbers begin at 0 again from here on, and stand for other blocks.
    pub(super) fn recorder_restarted(&mut self) {
        self.header.restarts += 1;
        self.first_id = self.next_id;
    }

    /// Appends a request of a model.
    pub(super) fn push(&mut self, request: &Recorded, model: &ModelFacts) -> Result<()> {
        if request.at < self.since {
            // It came before: another recording of the same recorder is older.
            return Ok(());
        }
        let model = self.number_of(model)?;
        let next = self.engines.len() as u32;
        let engine = *self.engines.entry(request.engine.to_string()).or_insert(next);
        let line = RequestLine::new(request, self.since, (engine, model), self.first_id);
        let line = if self.with_names { line.with_name(&request.engine) } else { line };
        let line = line.to_line();
        self.write(&line)?;
        let after =
            |run: &kvlane_trace::Run| run.first.saturating_add(run.count).saturating_add(self.first_id);
        let ends = request.blocks.iter().chain(&request.saved).map(after);
        self.next_id = ends.max().unwrap_or(0).max(self.next_id);
        self.header.requests += 1;
        self.blocks.0 += request.blocks.iter().map(|run| run.count).sum::<u64>();
        self.blocks.1 += request.hit.total();
        Ok(())
    }

    /// Writes what was appended, and the header with what it says now.
    pub(super) fn flush(&mut self) -> Result<()> {
        let line = self.header.to_line();
        let written = (|| {
            self.file.flush()?;
            let file = self.file.get_mut();
            file.seek(SeekFrom::Start(0))?;
            file.write_all(line.as_bytes())?;
            file.seek(SeekFrom::End(0))
        })();
        written.map(drop).with_context(|| self.failed())
    }

    /// "1,234 requests of 2 engines, 812.0 kB".
    pub(super) fn progress(&self) -> String {
        let plural = |count: u64, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let mut text = format!(
            "{} of {}, {}",
            plural(self.header.requests, "request"),
            plural(self.engines.len() as u64, "engine"),
            crate::size::Size(self.bytes)
        );
        if self.blocks.0 > 0 {
            text.push_str(&format!(
                "; {:.1} % of the looked-up blocks were hits",
                100.0 * self.blocks.1 as f64 / self.blocks.0 as f64
            ));
        }
        if self.header.dropped > 0 {
            text.push_str(&format!("; {} dropped", plural(self.header.dropped, "request")));
        }
        if self.header.restarts > 0 {
            text.push_str(&format!("; started again {}", plural(self.header.restarts, "time")));
        }
        text
    }

    /// The model's number, after its line.
    fn number_of(&mut self, model: &ModelFacts) -> Result<u32> {
        if let Some(number) = self.models.get(&model.namespace) {
            return Ok(*number);
        }
        let number = self.models.len() as u32;
        self.models.insert(model.namespace, number);
        if number == 0 {
            self.header.tokens_per_block = model.tokens_per_block;
            self.header.block_bytes = model.block_bytes;
        }
        let line = ModelLine {
            model: number,
            tokens_per_block: model.tokens_per_block,
            block_bytes: model.block_bytes,
            name: self.with_names.then(|| model.name.clone()),
        };
        let line = serde_json::to_string(&line)?;
        self.write(&format!("{line}\n"))?;
        Ok(number)
    }

    fn write(&mut self, text: &str) -> Result<()> {
        self.file.write_all(text.as_bytes()).with_context(|| self.failed())?;
        self.bytes += text.len() as u64;
        Ok(())
    }

    fn failed(&self) -> String {
        format!(
            "cannot write {}; the requests that it has can be replayed (make room, and record again)",
            self.path.display()
        )
    }
}
