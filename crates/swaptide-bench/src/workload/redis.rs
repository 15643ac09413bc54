//! The Redis server of `bench bgsave`: a child of the workload, so that it shares its budget or its
//! cgroup.
//!
//! Owns starting, filling and ending it; its files lie in a directory that the benchmark makes and
//! takes away. The protocol is as much as two commands need; what is measured is the server.

use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::workload::phases::{PAGE, PageContent, Phase, PhaseResult};

/// Bytes of a value: a quarter of a page, so that a page holds parts of few of them.
const VALUE_BYTES: usize = PAGE / 4;
/// Commands sent before their answers are read.
const PIPELINED_COMMANDS: usize = 256;
/// How long the server may take to begin.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// A server with data in it. It ends with this.
pub struct Server {
    child: Child,
    answers: BufReader<UnixStream>,
    commands: BufWriter<UnixStream>,
    directory: PathBuf,
}

impl Server {
    /// A server that holds `data` bytes of values, with its socket and its dumps in `directory`.
    pub fn start(
        data: u64,
        content: PageContent,
        directory: Option<&Path>,
    ) -> Result<(Server, PhaseResult), String> {
        let directory = directory.ok_or("--scratch: redis-server needs a directory")?.to_owned();
        let socket = directory.join("socket");
        let mut command = Command::new("redis-server");
        command.args(["--port", "0", "--save", "", "--appendonly", "no", "--dir"]).arg(&directory);
        command.arg("--unixsocket").arg(&socket).stdin(Stdio::null()).stdout(Stdio::null());
        // SAFETY: prctl may be called between fork and exec; it reads no memory. So the server ends
        // however this process does.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let mut child = command.spawn().map_err(|e| format!("redis-server: {e}"))?;
        let begin = Instant::now();
        let stream = loop {
            match UnixStream::connect(&socket).and_then(|stream| Ok((stream.try_clone()?, stream)))
            {
                Ok(stream) => break stream,
                Err(_)
                    if begin.elapsed() < START_TIMEOUT && matches!(child.try_wait(), Ok(None)) => {}
                Err(e) => {
                    let _ = (child.kill(), child.wait());
                    return Err(format!("redis-server does not listen: {e}"));
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let (answers, commands) = (BufReader::new(stream.0), BufWriter::new(stream.1));
        let mut server = Server { child, answers, commands, directory };
        let begin = Instant::now();
        server
            .fill(data / VALUE_BYTES as u64, content)
            .map_err(|e| format!("filling redis-server: {e}"))?;
        let seconds = begin.elapsed().as_secs_f64();
        Ok((server, PhaseResult::new(Phase::Redis, data / PAGE as u64, seconds)))
    }

    fn fill(&mut self, keys: u64, content: PageContent) -> std::io::Result<()> {
        let mut page = vec![0u64; PAGE / 8];
        let mut value = [0; VALUE_BYTES];
        for key in 0..keys {
            content.fill_page(&mut page, key as usize);
            // Each fourth word: of the noise as much as of the rest.
            for (bytes, word) in value.chunks_exact_mut(8).zip(page.iter().step_by(4)) {
                bytes.copy_from_slice(&word.to_ne_bytes());
            }
            write!(self.commands, "*3\r\n$3\r\nSET\r\n$12\r\n{key:012}\r\n${VALUE_BYTES}\r\n")?;
            self.commands.write_all(&value)?;
            self.commands.write_all(b"\r\n")?;
            if (key + 1) % PIPELINED_COMMANDS as u64 == 0 || key + 1 == keys {
                self.commands.flush()?;
                for _ in 0..key % PIPELINED_COMMANDS as u64 + 1 {
                    self.line("+OK")?;
                }
            }
        }
        Ok(())
    }

    /// The next line, which has to begin with `wanted`.
    fn line(&mut self, wanted: &str) -> std::io::Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        if line.starts_with(wanted) {
            Ok(line)
        } else {
            Err(std::io::Error::other(format!("redis-server says {line:?}")))
        }
    }

    fn persistence(&mut self) -> std::io::Result<String> {
        self.commands.write_all(b"INFO persistence\r\n")?;
        self.commands.flush()?;
        let head = self.line("$")?;
        let bytes: usize = head[1..].trim().parse().map_err(std::io::Error::other)?;
        let mut text = vec![0; bytes + 2];
        self.answers.read_exact(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// From the command until the dump is complete.
    pub(crate) fn save(&mut self, cap: Duration) -> Result<PhaseResult, String> {
        let begin = Instant::now();
        let ask = |server: &mut Server| -> std::io::Result<String> {
            server.commands.write_all(b"BGSAVE\r\n")?;
            server.commands.flush()?;
            server.line("+Background saving started")?;
            loop {
                let text = server.persistence()?;
                if !text.contains("rdb_bgsave_in_progress:1") || begin.elapsed() > cap {
                    return Ok(text);
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        let text = ask(self).map_err(|e| format!("BGSAVE: {e}"))?;
        let seconds = begin.elapsed().as_secs_f64();
        let capped = text.contains("rdb_bgsave_in_progress:1");
        if !capped && !text.contains("rdb_last_bgsave_status:ok") {
            return Err("BGSAVE failed; the server's log says why".into());
        }
        let dump = std::fs::metadata(self.directory.join("dump.rdb")).map_or(0, |file| file.len());
        let pages = dump / PAGE as u64;
        Ok(PhaseResult { capped, ..PhaseResult::new(Phase::Bgsave, pages, seconds) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = (self.child.kill(), self.child.wait());
    }
}
