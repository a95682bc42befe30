// SPDX-License-Identifier: MIT OR Apache-2.0

//! Big-endian bit fields in byte slices, and the positions of the fields of the mlx5 interface.
//!
//! The build script generates [`ifc`], [`wire`], [`op`] and [`constants`] from the kernel's headers. The names are
//! those of the headers, without prefix and in upper case. As in the headers, bit 0 is the most significant bit of the
//! first byte.
//!
//! Nothing in this module panics: a field outside of a slice reads as 0, and writes to it are ignored. Code that takes
//! a structure from a driver checks the length first, so that a short structure is refused instead of read as zeros.

/// A field of up to 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    offset: u32,
    width: u32,
}

impl Field {
    /// Creates a field of `width` bits at bit `offset` of a structure.
    pub const fn new(offset: u32, width: u32) -> Self {
        Self { offset, width }
    }

    /// Returns the offset in the structure, in bits.
    pub const fn offset(self) -> u32 {
        self.offset
    }

    /// Returns the width in bits.
    pub const fn width(self) -> u32 {
        self.width
    }

    /// Returns the largest value of the field.
    pub const fn max(self) -> u64 {
        if self.width >= 64 {
            u64::MAX
        } else {
            (1 << self.width) - 1
        }
    }

    /// Reads the field; 0 if the field is not in `bytes`.
    pub fn get(self, bytes: &[u8]) -> u64 {
        let first = (self.offset / 8) as usize;
        let end = (self.offset as usize + self.width as usize).div_ceil(8);
        let Some(bytes) = bytes.get(first..end) else {
            return 0;
        };
        let value = bytes
            .iter()
            .fold(0_u128, |value, byte| (value << 8) | u128::from(*byte));
        // Number of bits after the field in its last byte.
        let right = end * 8 - (self.offset + self.width) as usize;
        // Not truncated: masked to the width of the field.
        ((value >> right) as u64) & self.max()
    }

    /// Reads the low 32 bits of the field.
    pub fn get32(self, bytes: &[u8]) -> u32 {
        self.get(bytes) as u32
    }

    /// Returns whether the field is not 0.
    pub fn is_set(self, bytes: &[u8]) -> bool {
        self.get(bytes) != 0
    }

    /// Writes the low bits of `value` to the field. Does nothing if the field is not in `bytes`.
    pub fn set(self, bytes: &mut [u8], value: impl Into<u64>) {
        let first = (self.offset / 8) as usize;
        let end = (self.offset as usize + self.width as usize).div_ceil(8);
        let Some(bytes) = bytes.get_mut(first..end) else {
            return;
        };
        let right = end * 8 - (self.offset + self.width) as usize;
        let mut mask = u128::from(self.max()) << right;
        let mut value = (u128::from(value.into()) << right) & mask;
        for byte in bytes.iter_mut().rev() {
            // Truncated on purpose: byte by byte.
            *byte = *byte & !(mask as u8) | value as u8;
            mask >>= 8;
            value >>= 8;
        }
    }
}

/// A structure inside of another structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    offset: u32,
    width: u32,
}

impl Part {
    /// Creates a part of `width` bits at bit `offset` of a structure. Both must be multiples of 8.
    pub const fn new(offset: u32, width: u32) -> Self {
        Self { offset, width }
    }

    fn range(self) -> std::ops::Range<usize> {
        let start = (self.offset / 8) as usize;
        start..start + (self.width / 8) as usize
    }

    /// Returns the bytes of the part; empty if the part is not in `bytes`.
    pub fn of(self, bytes: &[u8]) -> &[u8] {
        bytes.get(self.range()).unwrap_or(&[])
    }

    /// Returns the bytes of the part for modification; empty if the part is not in `bytes`.
    pub fn of_mut(self, bytes: &mut [u8]) -> &mut [u8] {
        bytes.get_mut(self.range()).unwrap_or(&mut [])
    }

    /// Returns the offset in the outer structure, in bytes.
    pub const fn offset(self) -> usize {
        (self.offset / 8) as usize
    }

    /// Returns field `inner` of the part as a field of the outer structure.
    pub const fn field(self, inner: Field) -> Field {
        Field::new(self.offset + inner.offset, inner.width)
    }
}

/// An array of fields or structures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Array {
    offset: u32,
    width: u32,
    count: u32,
}

impl Array {
    /// Creates an array of `count` elements of `width` bits each at bit `offset` of a structure. A `count` of 0 means a
    /// flexible array, which extends to the end of the slice.
    pub const fn new(offset: u32, width: u32, count: u32) -> Self {
        Self { offset, width, count }
    }

    /// Returns the offset in the structure, in bytes.
    pub const fn offset(self) -> usize {
        (self.offset / 8) as usize
    }

    /// Returns the number of elements; 0 for a flexible array.
    pub const fn count(self) -> usize {
        self.count as usize
    }

    /// Returns the size of an element in bytes, if the size is a multiple of 8 bits.
    pub const fn stride(self) -> usize {
        (self.width / 8) as usize
    }

    /// Returns element `index` as a field. For an index outside of the array, the field is outside of every slice.
    pub fn at(self, index: usize) -> Field {
        let inside = self.count == 0 || index < self.count();
        let offset = u32::try_from(index)
            .ok()
            .filter(|_| inside)
            .and_then(|index| index.checked_mul(self.width)?.checked_add(self.offset))
            .filter(|offset| *offset < u32::MAX - 64);
        Field::new(offset.unwrap_or(u32::MAX - 64), self.width)
    }

    /// Returns the bytes of all elements; empty if they are not in `bytes`. For a flexible array, returns all bytes up to
    /// the end of `bytes`.
    pub fn of(self, bytes: &[u8]) -> &[u8] {
        let rest = bytes.get(self.offset()..).unwrap_or(&[]);
        match self.count {
            0 => rest,
            count => rest.get(..(count * self.width / 8) as usize).unwrap_or(&[]),
        }
    }

    /// Returns the same bytes as [`Array::of`], for modification.
    pub fn of_mut(self, bytes: &mut [u8]) -> &mut [u8] {
        let rest = bytes.get_mut(self.offset()..).unwrap_or(&mut []);
        match self.count {
            0 => rest,
            count => rest.get_mut(..(count * self.width / 8) as usize).unwrap_or(&mut []),
        }
    }
}

#[allow(missing_docs)]
mod generated {
    use super::{Array, Field, Part};

    include!(concat!(env!("OUT_DIR"), "/mlx5_layout.rs"));
}

pub use generated::{constants, ifc, op, wire};

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_have_known_offsets() {
        use ifc::{cmd_hca_cap, cqc, create_cq_in, mkc, qpc};
        // Expected values are taken from the headers by hand.
        assert_eq!((cqc::STATUS.offset(), cqc::STATUS.width()), (0, 4));
        assert_eq!((cqc::CQE_SZ.offset(), cqc::CQE_SZ.width()), (8, 3));
        assert_eq!(cqc::BYTES, 64);
        assert_eq!((cqc::LOG_CQ_SIZE.offset(), cqc::LOG_CQ_SIZE.width()), (0x63, 5));
        assert_eq!(
            (create_cq_in::CQ_CONTEXT.offset(), create_cq_in::PAS.offset()),
            (16, 272)
        );
        assert_eq!((create_cq_in::PAS.stride(), create_cq_in::PAS.count()), (8, 0));
        assert_eq!((qpc::STATE.offset(), qpc::STATE.width()), (0, 4));
        assert_eq!(qpc::BYTES, 232);
        assert_eq!((mkc::BYTES, mkc::LEN.offset(), mkc::LEN.width()), (64, 0xc0, 0x40));
        assert_eq!((cmd_hca_cap::BYTES, ifc::hca_cap_union::BYTES), (256, 4096));
        assert_eq!((wire::cqe64::BYTES, wire::cqe64::OP_OWN.offset()), (64, 63 * 8));
        assert_eq!((wire::eqe::BYTES, wire::eqe::OWNER.offset()), (64, 63 * 8));
        assert_eq!(wire::init_seg::HEALTH_COUNTER.offset(), 0x1010 * 8);
        assert_eq!(wire::cmd_prot_block::NEXT.offset(), 560 * 8);
        assert_eq!(wire::cmd_prot_block::BYTES, 576);
        assert_eq!((wire::mkey_seg::BYTES, wire::wqe_umr_ctrl_seg::BYTES), (64, 48));
        assert_eq!(
            (wire::wqe_ctrl_seg::BYTES, wire::wqe_ctrl_seg::FM_CE_SE.offset()),
            (16, 11 * 8)
        );
        assert_eq!((op::CREATE_QP, op::name(0x500)), (0x500, Some("CREATE_QP")));
        assert_eq!(op::name(0xfff), None);
        assert_eq!(constants::MLX5_OPCODE_UMR, 0x25);
        assert_eq!(constants::MLX5_MKEY_MASK_PAGE_SIZE_5, 1 << 42);
    }

    #[test]
    fn fields_beyond_slice_read_zero_and_ignore_writes() {
        let mut bytes = [0xff; 4];
        let field = Field::new(16, 24);
        assert_eq!(field.get(&bytes), 0);
        field.set(&mut bytes, 0_u32);
        assert_eq!(bytes, [0xff; 4]);
        assert_eq!(Part::new(0, 64).of(&bytes), &[] as &[u8]);
        assert_eq!(Array::new(0, 8, 5).of(&bytes), &[] as &[u8]);
        assert_eq!(Array::new(16, 8, 0).of(&bytes), &[0xff; 2]);
        assert_eq!(Array::new(16, 8, 2).at(2).get(&bytes), 0);
        assert_eq!(Array::new(0, 8, 0).at(usize::MAX).get(&bytes), 0);
    }

    proptest! {
        /// `get` returns the value of `set`, and `set` changes no other bit.
        #[test]
        fn set_changes_only_its_field(start in any::<[u8; 24]>(), offset in 0_u32..128, width in 1_u32..=64, value: u64) {
            let field = Field::new(offset, width);
            let mut bytes = start;
            field.set(&mut bytes, value);
            prop_assert_eq!(field.get(&bytes), value & field.max());
            for bit in 0..24 * 8_u32 {
                let one = Field::new(bit, 1);
                let expected = if (offset..offset + width).contains(&bit) {
                    (value >> (offset + width - 1 - bit)) & 1
                } else {
                    one.get(&start)
                };
                prop_assert_eq!(one.get(&bytes), expected);
            }
        }
    }
}
