//! Decompression of LZ4 blocks, made for swapped pages.
//!
//! Pages are full of runs: zeroed fields, repeated words, tables of equal records. In LZ4 a run is a match that overlaps
//! itself (its offset is smaller than its length), which decoders commonly copy byte by byte. Here short periods are widened
//! to 16 bytes or more first, so that a run costs about what a copy costs. Compressing is left to `lz4_flex`.
//!
//! Invariants of [`decompress`], for any input whatsoever:
//! 1. Nothing outside `block` is read and nothing outside `out` is read or written.
//! 2. Every byte a match copies from was written before by the same call.
//!
//! The format: sequences of a token (literal length in the high four bits, match length less 4 in the low ones; 15 means that
//! bytes follow to be added, up to one below 255), the literals, a match's offset in two bytes, low one first. The last
//! sequence ends after its literals.

use core::ptr;

use crate::codec::BadBlock;

/// Bytes moved at a time; a copy in steps may write up to one less than this beyond its end.
const STEP: usize = 16;
const MIN_MATCH: usize = 4;
/// Reading what was written a moment ago stalls: in a run, steps copy from this far back as soon as they can.
const FAR: usize = 8 * STEP;
/// Longest match whose length the token holds.
const SHORT_MATCH: usize = 14 + MIN_MATCH;
/// Input a short sequence may read: token, a step of literals, offset.
const SHORT_INPUT: usize = 1 + STEP + 2;
/// Output a short sequence may write: up to 14 literals, then two steps.
const SHORT_OUTPUT: usize = 14 + 2 * STEP;

/// Decompresses one block into exactly `out`.
pub(crate) fn decompress(block: &[u8], out: &mut [u8]) -> Result<(), BadBlock> {
    let mut at = 0;
    let mut done = 0;
    loop {
        // Short sequences, the bulk of most pages, while neither end is near.
        while block.len() - at >= SHORT_INPUT && out.len() - done >= SHORT_OUTPUT {
            // SAFETY: that much input is there to read, and that much output to write, from these places on.
            let (from, to) = unsafe { (block.as_ptr().add(at), out.as_mut_ptr().add(done)) };
            // SAFETY: the first of SHORT_INPUT bytes.
            let token = unsafe { from.read() };
            let (literals, len) = (usize::from(token >> 4), usize::from(token & 15) + MIN_MATCH);
            if literals == 15 || len > SHORT_MATCH {
                break;
            }
            // SAFETY: a step is within SHORT_INPUT and SHORT_OUTPUT, and so are the two bytes after 14 literals.
            let offset = unsafe {
                copy_step(from.add(1), to);
                usize::from(u16::from_le_bytes(from.add(1 + literals).cast::<[u8; 2]>().read()))
            };
            at += 1 + literals + 2;
            done += literals;
            if offset == 0 || offset > done {
                return Err(BadBlock);
            }
            // SAFETY: `offset` bytes before the literals' end are written; two steps after it are within SHORT_OUTPUT.
            unsafe { copy_short(to.add(literals), offset, len) };
            done += len;
        }
        let mut input = &block[at..];
        let token = take_byte(&mut input)?;
        let mut literals = usize::from(token >> 4);
        if literals == 15 {
            literals += take_length(&mut input)?;
        }
        let (source, rest) = input.split_at_checked(literals).ok_or(BadBlock)?;
        out[done..].get_mut(..literals).ok_or(BadBlock)?.copy_from_slice(source);
        done += literals;
        if rest.is_empty() {
            return if done == out.len() { Ok(()) } else { Err(BadBlock) };
        }
        let (offset, rest) = rest.split_first_chunk().ok_or(BadBlock)?;
        input = rest;
        let offset = usize::from(u16::from_le_bytes(*offset));
        let mut len = usize::from(token & 15) + MIN_MATCH;
        if len > SHORT_MATCH {
            len += take_length(&mut input)?;
        }
        if offset == 0 || offset > done || len > out.len() - done {
            return Err(BadBlock);
        }
        // SAFETY: the bytes from `done - offset` on are inside `out` and written up to `done`; `len` more fit behind them.
        unsafe { copy_match(out.as_mut_ptr().add(done), offset, len, out.len() - done) };
        done += len;
        at = block.len() - input.len();
    }
}

fn take_byte(input: &mut &[u8]) -> Result<u8, BadBlock> {
    let (&byte, rest) = input.split_first().ok_or(BadBlock)?;
    *input = rest;
    Ok(byte)
}

/// What is to be added to a length of 15. Cannot overflow: a block is far shorter than the address space.
fn take_length(input: &mut &[u8]) -> Result<usize, BadBlock> {
    let mut sum = 0;
    loop {
        let byte = take_byte(input)?;
        sum += usize::from(byte);
        if byte != u8::MAX {
            return Ok(sum);
        }
    }
}

/// Copies `N` bytes.
///
/// # Safety
/// They can be read at `from` and written at `to`. The ranges may overlap: all is read before anything is written.
#[inline(always)]
unsafe fn copy_bytes<const N: usize>(from: *const u8, to: *mut u8) {
    // SAFETY: as the caller promises; a byte array needs no alignment.
    unsafe { to.cast::<[u8; N]>().write(from.cast::<[u8; N]>().read()) }
}

/// Copies one step.
///
/// # Safety
/// As for [`copy_bytes`].
#[inline(always)]
unsafe fn copy_step(from: *const u8, to: *mut u8) {
    // SAFETY: as the caller promises.
    unsafe { copy_bytes::<STEP>(from, to) }
}

/// Writes `len` bytes, at most [`SHORT_MATCH`], at `to`, each equal to the one `offset` bytes before it.
///
/// # Safety
/// `offset` is at least 1, that many bytes before `to` are initialized, and two steps from `to` on can be written.
#[inline(always)]
unsafe fn copy_short(to: *mut u8, offset: usize, len: usize) {
    // SAFETY: `offset` bytes before `to` are inside the buffer (caller); all writes are within two steps, and each reads what
    // lies before `to` or was written just before.
    unsafe {
        let from = to.sub(offset).cast_const();
        if offset >= STEP {
            copy_step(from, to);
            copy_bytes::<{ SHORT_MATCH - STEP }>(from.add(STEP), to.add(STEP));
        } else if offset >= 8 {
            copy_bytes::<8>(from, to);
            copy_bytes::<8>(from.add(8), to.add(8));
            copy_bytes::<{ SHORT_MATCH - STEP }>(from.add(STEP), to.add(STEP));
        } else {
            for i in 0..len {
                to.add(i).write(from.add(i).read());
            }
        }
    }
}

/// Writes `len` bytes at `to`, each equal to the one `offset` bytes before it.
///
/// # Safety
/// `offset` is at least 1 and that many bytes before `to` are initialized; `room` bytes from `to` on can be written; `len` is
/// not greater than `room`.
#[inline(always)]
unsafe fn copy_match(to: *mut u8, offset: usize, len: usize, room: usize) {
    // SAFETY: `to - offset` is inside the buffer (caller).
    let from = unsafe { to.sub(offset).cast_const() };
    if offset == 1 {
        // SAFETY: `len` bytes can be written, one before them read.
        unsafe { ptr::write_bytes(to, from.read(), len) };
        return;
    }
    // As far as steps may overshoot.
    let wide = len.min(room.saturating_sub(STEP));
    if wide > 0 {
        // SAFETY: at least `wide + STEP` bytes from `to` on can be written; the rest is the caller's promise.
        unsafe { copy_wide(from, to, wide) };
    }
    for i in wide..len {
        // SAFETY: `i` is below `len`, so both places are inside what the caller promises, the source initialized before.
        unsafe { to.add(i).write(from.add(i).read()) };
    }
}

/// As [`copy_match`], in steps: writes up to a step more.
///
/// # Safety
/// As for [`copy_match`], with `len` at least 1, `len + STEP` bytes to write to, and `from` 2 bytes or more before `to`.
#[inline(always)]
unsafe fn copy_wide(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: one buffer.
    let offset = unsafe { to.cast_const().offset_from_unsigned(from) };
    let mut back = offset;
    let mut at = 0;
    if offset < STEP {
        // The period fills the first step; from then on, copy from a multiple of it that is a step or more back.
        if offset >= 8 {
            // SAFETY: a step is writable (`len + STEP`); the second half reads what is before `to` or was just written.
            unsafe {
                copy_bytes::<8>(from, to);
                copy_bytes::<8>(from.add(8), to.add(8));
            }
        } else {
            for i in 0..STEP {
                // SAFETY: as above, byte by byte.
                unsafe { to.add(i).write(from.add(i).read()) };
            }
        }
        at = STEP;
        if STEP.is_multiple_of(offset) {
            // SAFETY: the first step was just written; the last write ends before `len + STEP`.
            unsafe {
                let step = to.cast::<[u8; STEP]>().read();
                while at < len {
                    to.add(at).cast::<[u8; STEP]>().write(step);
                    at += STEP;
                }
            }
            return;
        }
        back = offset * STEP.div_ceil(offset);
    }
    while at < len {
        // SAFETY: `back` is a step or more, so what is read is written already, and at most `at + offset`, so nothing before
        // `from` is read (in the first round of a short period, `at` is a step, and `back` exceeds `offset` by less). The last
        // write ends before `len + STEP`.
        unsafe { copy_step(to.add(at).sub(back).cast_const(), to.add(at)) };
        at += STEP;
        if back < FAR && at + offset >= 2 * back {
            back *= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};
    use proptest::prelude::*;

    use super::*;

    fn compress(data: &[u8]) -> Vec<u8> {
        let mut block = vec![0; get_maximum_output_size(data.len())];
        let len = compress_into(data, &mut block).unwrap();
        block.truncate(len);
        block
    }

    /// Decompresses in the middle of a guarded buffer.
    fn guarded(block: &[u8], len: usize) -> Option<Vec<u8>> {
        const GUARD: usize = 64;
        let mut buffer = vec![0xa5; len + 2 * GUARD];
        let answer = decompress(block, &mut buffer[GUARD..GUARD + len]);
        assert!(buffer[..GUARD].iter().chain(&buffer[GUARD + len..]).all(|&byte| byte == 0xa5), "written outside");
        answer.ok().map(|()| buffer[GUARD..GUARD + len].to_vec())
    }

    /// Runs of every period, literals, and far matches, one after the other.
    fn data() -> impl Strategy<Value = Vec<u8>> {
        let run = (prop::collection::vec(any::<u8>(), 1..40), 1usize..600)
            .prop_map(|(period, len)| period.into_iter().cycle().take(len).collect::<Vec<u8>>());
        let noise = prop::collection::vec(any::<u8>(), 0..100);
        prop::collection::vec(prop_oneof![3 => run, 1 => noise], 1..30).prop_map(|parts| {
            let mut data = parts.concat();
            // Some of it again, far away.
            let again = data[..data.len() / 2].to_vec();
            data.extend(again);
            data
        })
    }

    #[test]
    fn every_period_and_every_end() {
        for period in 1..40usize {
            for len in (0..120).chain([500, 4096]) {
                let data: Vec<u8> = (0..period as u8).cycle().take(period + len).chain([200, 201, 202, 203, 204]).collect();
                assert!(guarded(&compress(&data), data.len()) == Some(data), "period {period}, length {len}");
            }
        }
    }

    proptest! {
        #[test]
        fn gives_back_what_was_compressed(data in data()) {
            let block = compress(&data);
            prop_assert!(guarded(&block, data.len()).as_ref() == Some(&data));
            prop_assert!(guarded(&block, data.len() + 1).is_none());
            prop_assert!(guarded(&block, data.len() - 1).is_none());
            prop_assert!(guarded(&block[..block.len() - 1], data.len()).is_none());
        }

        /// A damaged block decompresses to something or to nothing, but touches nothing outside.
        #[test]
        fn survives_any_damage(data in data(), changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
            let mut block = compress(&data);
            for (at, byte) in changes {
                let at = at.index(block.len());
                block[at] = byte;
            }
            // In an allocation of its own size, for a sanitizer to see.
            let _ = guarded(&block.clone().into_boxed_slice(), data.len());
        }

        #[test]
        fn agrees_on_arbitrary_bytes(block in prop::collection::vec(any::<u8>(), 1..60), len in 1usize..300) {
            if let Some(ours) = guarded(&block, len) {
                let mut theirs = vec![0; len];
                prop_assert_eq!(decompress_into(&block, &mut theirs).ok(), Some(len));
                prop_assert!(ours == theirs);
            }
        }
    }
}
