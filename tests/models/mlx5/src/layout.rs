// SPDX-License-Identifier: MIT OR Apache-2.0

//! Big-endian bit fields in byte slices, and the position of each field of the mlx5 interface.
//!
//! The build generates [`ifc`], [`wire`], [`op`] and [`constants`] from the kernel's headers; their names are the headers'
//! own, without prefix and in upper case. Bit 0 is the most significant bit of the first byte, as in the headers.
//!
//! No function here panics: fields beyond the end of a slice read as 0 and are not written. A caller that gets a structure
//! from a driver must check its length first, so that a short structure is refused instead of being read as zeros.

/// A field of up to 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    offset: u32,
    width: u32,
}

impl Field {
    /// A field of `width` bits, `offset` bits from the start.
    pub const fn new(offset: u32, width: u32) -> Self {
        Self { offset, width }
    }

    /// Distance from the start of the structure in bits.
    pub const fn offset(self) -> u32 {
        self.offset
    }

    /// Width in bits.
    pub const fn width(self) -> u32 {
        self.width
    }

    /// The largest value the field can hold.
    pub const fn max(self) -> u64 {
        if self.width >= 64 {
            u64::MAX
        } else {
            (1 << self.width) - 1
        }
    }

    /// The field's value; 0 if it does not lie in `bytes`.
    pub fn get(self, bytes: &[u8]) -> u64 {
        let first = (self.offset / 8) as usize;
        let end = (self.offset as usize + self.width as usize).div_ceil(8);
        let Some(bytes) = bytes.get(first..end) else {
            return 0;
        };
        let value = bytes
            .iter()
            .fold(0_u128, |value, byte| (value << 8) | u128::from(*byte));
        // Bits to the right of the field in its last byte.
        let right = end * 8 - (self.offset + self.width) as usize;
        // Not truncated: masked to the field's width.
        ((value >> right) as u64) & self.max()
    }

    /// The value of a field of up to 32 bits; the low 32 bits of a wider one.
    pub fn get32(self, bytes: &[u8]) -> u32 {
        self.get(bytes) as u32
    }

    /// Whether the field is not 0.
    pub fn is_set(self, bytes: &[u8]) -> bool {
        self.get(bytes) != 0
    }

    /// Sets the field to the low bits of `value`; does nothing if it does not lie in `bytes`.
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

/// A structure inside of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    offset: u32,
    width: u32,
}

impl Part {
    /// A structure of `width` bits, `offset` bits from the start. Both are whole bytes, or it cannot be taken out.
    pub const fn new(offset: u32, width: u32) -> Self {
        Self { offset, width }
    }

    fn range(self) -> std::ops::Range<usize> {
        let start = (self.offset / 8) as usize;
        start..start + (self.width / 8) as usize
    }

    /// Its bytes; none if it does not lie in `bytes`.
    pub fn of(self, bytes: &[u8]) -> &[u8] {
        bytes.get(self.range()).unwrap_or(&[])
    }

    /// Its bytes to be changed; none if it does not lie in `bytes`.
    pub fn of_mut(self, bytes: &mut [u8]) -> &mut [u8] {
        bytes.get_mut(self.range()).unwrap_or(&mut [])
    }

    /// Distance from the start of the outer structure in bytes.
    pub const fn offset(self) -> usize {
        (self.offset / 8) as usize
    }

    /// A field of the inner structure as one of the outer.
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
    /// An array of `count` elements of `width` bits, `offset` bits from the start; `count` is 0 for one that ends with
    /// the structure it is in.
    pub const fn new(offset: u32, width: u32, count: u32) -> Self {
        Self { offset, width, count }
    }

    /// Distance from the start of the structure in bytes.
    pub const fn offset(self) -> usize {
        (self.offset / 8) as usize
    }

    /// Number of elements; 0 if the array has no length of its own.
    pub const fn count(self) -> usize {
        self.count as usize
    }

    /// Size of an element in bytes, if it is whole bytes.
    pub const fn stride(self) -> usize {
        (self.width / 8) as usize
    }

    /// Element `index` as a field. An index outside of the array makes a field that lies in no slice.
    pub fn at(self, index: usize) -> Field {
        let inside = self.count == 0 || index < self.count();
        let offset = u32::try_from(index)
            .ok()
            .filter(|_| inside)
            .and_then(|index| index.checked_mul(self.width)?.checked_add(self.offset))
            .filter(|offset| *offset < u32::MAX - 64);
        Field::new(offset.unwrap_or(u32::MAX - 64), self.width)
    }

    /// The bytes of all elements; those up to the slice's end if the array has no length of its own. None if they do not
    /// lie in `bytes`.
    pub fn of(self, bytes: &[u8]) -> &[u8] {
        let rest = bytes.get(self.offset()..).unwrap_or(&[]);
        match self.count {
            0 => rest,
            count => rest.get(..(count * self.width / 8) as usize).unwrap_or(&[]),
        }
    }

    /// As [`Array::of`], to be changed.
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
    fn known_places() {
        use ifc::{cmd_hca_cap, cqc, create_cq_in, mkc, qpc};
        // Read off the headers by hand, field by field.
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
    fn short_slices_are_zeros_and_stay() {
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
        /// A field set reads back, and no other bit changes.
        #[test]
        fn set_and_get(start in any::<[u8; 24]>(), offset in 0_u32..128, width in 1_u32..=64, value: u64) {
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
