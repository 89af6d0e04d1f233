//! An endless stream of bytes, different for each seed, that can be computed from any offset.

/// The stream of one seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pattern {
    seed: u64,
}

impl Pattern {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Fills `buffer` with the stream's bytes from `offset` on.
    pub fn fill(self, offset: u64, buffer: &mut [u8]) {
        let skip = (offset % 8) as usize;
        let mut word = offset / 8;
        let (head, body) = buffer.split_at_mut(((8 - skip) % 8).min(buffer.len()));
        if !head.is_empty() {
            head.copy_from_slice(&self.word(word)[skip..skip + head.len()]);
            word += 1;
        }
        for chunk in body.chunks_mut(8) {
            chunk.copy_from_slice(&self.word(word)[..chunk.len()]);
            word += 1;
        }
    }

    /// The bytes from `offset` on.
    pub fn bytes(self, offset: u64, length: usize) -> Vec<u8> {
        let mut buffer = vec![0; length];
        self.fill(offset, &mut buffer);
        buffer
    }

    /// One step of SplitMix64 at `index`.
    fn word(self, index: u64) -> [u8; 8] {
        let mut z =
            self.seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)).to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_offset_gives_the_same_stream() {
        let whole = Pattern::new(7).bytes(0, 100);
        for offset in 0..100 {
            for length in 0..100 - offset {
                let part = Pattern::new(7).bytes(offset as u64, length);
                assert_eq!(part, whole[offset..offset + length], "{offset} {length}");
            }
        }
        assert_ne!(Pattern::new(8).bytes(0, 100), whole);
    }
}
