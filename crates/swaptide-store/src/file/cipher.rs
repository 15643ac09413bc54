//! Sealing and opening packed pages: AES-256-GCM with a key of this process's own, or as they are
//! with a tag.
//!
//! The processes that share the swap areas share their key. Each derives its own from it and a salt
//! that no other has, so a counter is enough for the nonce. The place is authenticated with the
//! object: one that turns up elsewhere does not open.
//!
//! What lies on an area without a cipher is [`Form::Plain`]: what can read the area can read it.
//! Its tag is POLYVAL under a secret key, over counter, place and object. Tags stay in memory,
//! so a writer to the area learns none, and what was changed there does not open either.
//!
//! Invariant: a counter is used for one object only, as long as the cipher lives. Two objects under
//! one nonce would give their difference away, and the key of the authentication.

use polyval::universal_hash::UniversalHash;
use polyval::{Block, Polyval};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hmac;

/// Proves that an object is the one that was sealed.
pub(super) type Tag = [u8; 16];

/// The form of an object on its area.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Form {
    /// Encrypted and authenticated.
    Sealed,
    /// As it is, authenticated alone.
    Plain,
}

pub(super) struct Cipher {
    aead: LessSafeKey,
    /// The initial state of the tags of plain objects.
    plain: Polyval,
    /// The secret from which others are derived.
    secret: hmac::Key,
}

impl Cipher {
    pub(super) fn new(key: &[u8; 32], salt: u64) -> Cipher {
        let common = hmac::Key::new(hmac::HMAC_SHA256, key);
        let own = |purpose: &[u8]| hmac::sign(&common, &[purpose, &salt.to_le_bytes()].concat());
        let key = UnboundKey::new(&AES_256_GCM, own(b"swaptide pages ").as_ref())
            .expect("the key is as long as the cipher's");
        let secret = hmac::Key::new(hmac::HMAC_SHA256, own(b"swaptide others ").as_ref());
        let plain: [u8; 16] =
            *hmac::sign(&secret, b"plain objects").as_ref().first_chunk().expect("it has 32 bytes");
        Cipher { aead: LessSafeKey::new(key), plain: Polyval::new(&plain.into()), secret }
    }

    /// A secret of its own, for digests. The same for every cipher of this key and salt.
    pub(super) fn digest_key(&self) -> [u8; 16] {
        let whole = hmac::sign(&self.secret, b"digests");
        *whole.as_ref().first_chunk().expect("it has 32 bytes")
    }

    /// Puts `object` into `sealed`, which is as long, in that form. `counter` must never have been
    /// used with this cipher before.
    pub(super) fn seal(
        &self,
        form: Form,
        counter: u64,
        place: [u8; 8],
        object: &[u8],
        sealed: &mut [u8],
    ) -> Tag {
        sealed.copy_from_slice(object);
        if form == Form::Plain {
            return self.plain_tag(counter, place, object);
        }
        let tag = self.aead.seal_in_place_separate_tag(nonce(counter), Aad::from(place), sealed);
        tag.expect("an object is within the cipher's limits")
            .as_ref()
            .try_into()
            .expect("a tag has 16 bytes")
    }

    fn plain_tag(&self, counter: u64, place: [u8; 8], object: &[u8]) -> Tag {
        let mut state = self.plain.clone();
        let mut first = [0; 16];
        first[..8].copy_from_slice(&counter.to_le_bytes());
        // The object's length is in it.
        first[8..].copy_from_slice(&place);
        state.update(&[Block::from(first)]);
        let (blocks, rest) = object.as_chunks();
        state.update(Block::cast_slice_from_core(blocks));
        if !rest.is_empty() {
            let mut last = [0; 16];
            last[..rest.len()].copy_from_slice(rest);
            state.update(&[Block::from(last)]);
        }
        state.finalize().into()
    }

    /// Opens in place; `false` when it is not the object that was sealed: its contents are then
    /// undefined.
    pub(super) fn open(
        &self,
        form: Form,
        counter: u64,
        place: [u8; 8],
        tag: &Tag,
        object: &mut [u8],
    ) -> bool {
        if form == Form::Plain {
            return self.plain_tag(counter, place, object) == *tag;
        }
        self.aead
            .open_in_place_separate_tag(
                nonce(counter),
                Aad::from(place),
                (*tag).into(),
                object,
                0..,
            )
            .is_ok()
    }

    /// As [`Self::open`], from one buffer into another of the same length.
    pub(super) fn open_into(
        &self,
        form: Form,
        counter: u64,
        place: [u8; 8],
        tag: &Tag,
        sealed: &[u8],
        object: &mut [u8],
    ) -> bool {
        object.copy_from_slice(sealed);
        self.open(form, counter, place, tag, object)
    }
}

fn nonce(counter: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[..8].copy_from_slice(&counter.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE_SIZE;

    #[test]
    fn opens_only_what_was_sealed_where_it_was_sealed() {
        let cipher = Cipher::new(&[1; 32], 7);
        for (len, form) in [1, 100, PAGE_SIZE]
            .into_iter()
            .flat_map(|len| [(len, Form::Sealed), (len, Form::Plain)])
        {
            let object = vec![0x5a; len];
            let mut sealed = vec![0; len];
            let tag = cipher.seal(form, 3, [10; 8], &object, &mut sealed);
            assert_eq!(sealed == object, form == Form::Plain);
            let open = |cipher: &Cipher, counter, place, flip: Option<usize>| {
                let mut copy = sealed.clone();
                if let Some(at) = flip {
                    copy[at] ^= 1;
                }
                let mut elsewhere = vec![0; len];
                let opens =
                    cipher.open_into(form, counter, [place; 8], &tag, &copy, &mut elsewhere);
                assert_eq!(cipher.open(form, counter, [place; 8], &tag, &mut copy), opens);
                assert!(!opens || copy == elsewhere);
                opens.then_some(copy)
            };
            assert!(open(&cipher, 3, 10, None) == Some(object));
            assert!(open(&cipher, 4, 10, None).is_none(), "another counter");
            assert!(open(&cipher, 3, 11, None).is_none(), "another place");
            assert!(open(&cipher, 3, 10, Some(len - 1)).is_none(), "a flipped bit");
            assert!(open(&Cipher::new(&[1; 32], 8), 3, 10, None).is_none(), "another salt");
            assert!(open(&Cipher::new(&[2; 32], 7), 3, 10, None).is_none(), "another key");
        }
    }
}
