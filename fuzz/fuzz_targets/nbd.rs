//! The transmission phase of NBD with a server that breaks the protocol as the fuzzer's bytes tell.
//!
//! Unless the server lies about contents, which nothing here could tell, but only about everything
//! else: places, lengths, kinds, cookies, order, errors, ends, a read that succeeds must have the
//! export's contents, and nothing outside of its buffer may change.
#![no_main]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use swaptide_fuzz::Bytes;
use swaptide_store::nbd::{Dialer, Export, Flags, Nbd, Options};
use swaptide_sys::{Errno, OwnedFd};

const SIZE: u64 = 1 << 20;

fn content(at: u64) -> u8 {
    (at / 7 ^ at / 4096 ^ at >> 13) as u8
}

struct Server {
    script: Arc<Mutex<Vec<u8>>>,
    /// Contents were lied about: a hole, which reads as zeros, whatever the export has there;
    /// another request's data; a reply that is shorter or longer than it says, so that the next one
    /// is taken for data.
    lied: Arc<AtomicBool>,
    structured: bool,
}

impl Server {
    fn next(&self) -> Option<u8> {
        self.script.lock().expect("script").pop()
    }

    fn serve(&self, mut stream: UnixStream) -> Option<()> {
        loop {
            let mut head = [0; 28];
            stream.read_exact(&mut head).ok()?;
            assert_eq!(head[..4], [0x25, 0x60, 0x95, 0x13], "no request");
            let command = u16::from_be_bytes([head[6], head[7]]);
            let cookie = u64::from_be_bytes(head[8..16].try_into().ok()?);
            let offset = u64::from_be_bytes(head[16..24].try_into().ok()?);
            let len = u32::from_be_bytes(head[24..28].try_into().ok()?);
            assert!(command == 2 || offset + u64::from(len) <= SIZE, "a request past the end");
            if command == 1 {
                stream.read_exact(&mut vec![0; len as usize]).ok()?;
            }
            let mut reply = Vec::new();
            // Without bytes left, it does as it should.
            loop {
                let what = self.next().unwrap_or(0);
                let cookie = if what & 0x40 != 0 {
                    // The data of one request for another: a simple reply does not tell whose it
                    // is.
                    self.lied.store(true, SeqCst);
                    cookie ^ u64::from(self.next()?)
                } else {
                    cookie
                };
                let (mut at, mut n) = (offset, len);
                if what & 0x20 != 0 {
                    let lie = u32::from(self.next()?);
                    if what & 0x80 != 0 {
                        at = at.wrapping_add(u64::from(lie) * 512)
                    } else {
                        n = n.wrapping_add(lie * 512) % (SIZE as u32)
                    }
                }
                let data = |at: u64, n: u32| {
                    (0..u64::from(n)).map(|i| content(at.wrapping_add(i))).collect::<Vec<u8>>()
                };
                let chunk = |flags: u16, kind: u16, payload: &[u8]| {
                    let head = [
                        &0x668e_33efu32.to_be_bytes()[..],
                        &flags.to_be_bytes(),
                        &kind.to_be_bytes(),
                        &cookie.to_be_bytes(),
                    ]
                    .concat();
                    [&head[..], &(payload.len() as u32).to_be_bytes(), payload].concat()
                };
                let simple = |error: u32| {
                    [&0x6744_6698u32.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes()]
                        .concat()
                };
                match what & 0x1f {
                    0..=7 if command == 0 && self.structured => {
                        reply.extend(chunk(1, 1, &[&at.to_be_bytes()[..], &data(at, n)].concat()))
                    }
                    0..=7 if command == 0 => {
                        self.lied.fetch_or(n != len, SeqCst);
                        reply.extend([simple(0), data(offset, n)].concat());
                    }
                    0..=7 => reply.extend(simple(0)),
                    8 => reply.extend(chunk(1, 0, &[])),
                    9 => {
                        self.lied.store(true, SeqCst);
                        reply.extend(chunk(
                            u16::from(self.next()? & 1),
                            2,
                            &[&at.to_be_bytes()[..], &n.to_be_bytes()].concat(),
                        ));
                    }
                    // A part of the data; the rest may come with the next byte of the script.
                    10..=13 => reply.extend(chunk(
                        u16::from(what & 1),
                        1,
                        &[&at.to_be_bytes()[..], &data(at, n / 2)].concat(),
                    )),
                    14 | 15 => {
                        let rest = at.wrapping_add(u64::from(n / 2));
                        reply.extend(chunk(
                            1,
                            1,
                            &[&rest.to_be_bytes()[..], &data(rest, n - n / 2)].concat(),
                        ));
                    }
                    16 => reply.extend(simple(u32::from(self.next()?).max(1))),
                    17 => {
                        let text = u16::from(self.next()?);
                        reply.extend(chunk(
                            1,
                            0x8001,
                            &[
                                &u32::from(text).to_be_bytes()[..],
                                &text.to_be_bytes(),
                                &vec![b'x'; usize::from(text / 2)],
                            ]
                            .concat(),
                        ));
                    }
                    18 => reply.extend(chunk(
                        0,
                        0x8002,
                        &[&5u32.to_be_bytes()[..], &0u16.to_be_bytes(), &at.to_be_bytes()].concat(),
                    )),
                    19 => {
                        self.lied.store(true, SeqCst);
                        reply.extend(chunk(
                            u16::from(self.next()?),
                            u16::from(self.next()?) << 8 | u16::from(self.next()?),
                            &data(at, n % 64),
                        ));
                    }
                    20 => reply.extend([self.next()?, self.next()?, self.next()?]),
                    21 => {
                        self.lied.store(true, SeqCst);
                        reply.truncate(reply.len() / 2);
                    }
                    22 => {
                        let _ = stream.write_all(&reply);
                        return None;
                    }
                    // The same once more.
                    23 => reply.extend_from_within(..),
                    24 => reply.extend(chunk(
                        1,
                        1,
                        &at.to_be_bytes()[..usize::from(self.next()? % 9)],
                    )),
                    _ => {
                        self.lied.store(true, SeqCst);
                        reply.extend([simple(0), data(offset, n)].concat());
                    }
                }
                // Another part of the answer, or the next request.
                if self.next().unwrap_or(0) & 3 != 1 || reply.len() > 4 << 20 {
                    break;
                }
            }
            stream.write_all(&reply).ok()?;
        }
    }
}

impl Dialer for Server {
    fn dial(&self) -> Result<OwnedFd, Errno> {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let server = Server {
            script: Arc::clone(&self.script),
            lied: Arc::clone(&self.lied),
            structured: self.structured,
        };
        std::thread::spawn(move || server.serve(theirs));
        Ok(ours.into())
    }
}

fuzz_target!(|data: &[u8]| {
    let mut bytes = Bytes(data);
    let (Some(kind), Some(n)) = (bytes.byte(), bytes.byte()) else { return };
    let calls: Vec<[u8; 3]> = bytes.some(3 * usize::from(n % 8)).as_chunks().0.to_vec();
    let mut script = bytes.0.to_vec();
    script.reverse();
    let lied = Arc::new(AtomicBool::new(false));
    let server = Server {
        script: Arc::new(Mutex::new(script)),
        lied: Arc::clone(&lied),
        structured: kind & 1 == 1,
    };
    let all = Flags::HAS_FLAGS | Flags::SEND_FLUSH | Flags::SEND_TRIM | Flags::CAN_MULTI_CONN;
    let longest = [4096, 65536, 32 << 20, 1][usize::from(kind >> 1 & 3)];
    let export = Export {
        size: SIZE,
        flags: all,
        structured: server.structured,
        longest,
        connections: 1 + u32::from(kind >> 3 & 1),
    };
    let limit = Duration::from_millis(50);
    let options = Options {
        request_limit: limit,
        read_timeout: 3 * limit,
        write_timeout: 3 * limit,
        drain: limit,
        durable: kind & 16 != 0,
    };
    let nbd = Nbd::new(export, options, Box::new(server), Vec::new());
    let begun = Instant::now();
    for [what, at, len] in &calls {
        let (offset, len) = (u64::from(*at) << 12 | u64::from(*len) & 7, usize::from(*len) * 256);
        match what % 5 {
            0 | 1 => {
                let mut buf = vec![0xEE; len + 128];
                let answer = nbd.read_at(offset, &mut buf[64..64 + len]);
                assert!(
                    buf[..64].iter().chain(&buf[64 + len..]).all(|byte| *byte == 0xEE),
                    "written outside of the buffer"
                );
                if let Ok(n) = answer
                    && !lied.load(SeqCst)
                {
                    assert!(n <= len);
                    let wrong = (0..n).find(|i| buf[64 + i] != content(offset + *i as u64));
                    assert_eq!(wrong, None, "of {n} bytes from {offset} on");
                }
            }
            2 => {
                let mut pages = vec![[0xEEu8; 4096]; 1 + len / 4096];
                let mut places: Vec<(u64, &mut [u8])> = pages
                    .iter_mut()
                    .enumerate()
                    .map(|(i, page)| ((offset + i as u64 * 8192) % (SIZE - 4096), &mut page[..]))
                    .collect();
                if nbd.read_many(&mut places).is_ok() && !lied.load(SeqCst) {
                    for (offset, page) in places {
                        assert!(
                            page.iter().zip(offset..).all(|(byte, at)| *byte == content(at)),
                            "the page at {offset}"
                        );
                    }
                }
            }
            3 => drop(nbd.write_at(offset, &vec![7; len])),
            _ => drop((nbd.trim(offset, 4096), nbd.flush())),
        }
    }
    assert!(begun.elapsed() < Duration::from_secs(20), "no call takes longer than its timeout");
});
