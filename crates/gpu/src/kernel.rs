//! The compiled copy kernel; `scripts/build_kernels.py` makes it from `kernels/copy.cu`.

/// Name of the kernel.
pub(crate) const NAME: &std::ffi::CStr = c"kvlane_copy";

/// Threads of a block; the kernel is compiled for no more.
pub(crate) const THREADS: u32 = 512;

/// Machine code as an object file, whose parts are aligned.
#[repr(C, align(16))]
struct Aligned<T: ?Sized>(T);

static SM_80: &Aligned<[u8]> = &Aligned(*include_bytes!("../kernels/copy.sm_80.cubin"));
static SM_90: &Aligned<[u8]> = &Aligned(*include_bytes!("../kernels/copy.sm_90.cubin"));
static SM_100: &Aligned<[u8]> = &Aligned(*include_bytes!("../kernels/copy.sm_100.cubin"));
/// PTX for all other devices, which the driver compiles. It ends in a zero.
static PTX: &str = concat!(include_str!("../kernels/copy.ptx"), "\0");

/// The image for a device of this compute capability. Machine code runs on devices of its own major number with at least its
/// minor number.
pub(crate) fn image((major, minor): (u32, u32)) -> &'static [u8] {
    let cubins = [((8, 0), &SM_80.0), ((9, 0), &SM_90.0), ((10, 0), &SM_100.0)];
    let runs = |((its_major, its_minor), _): &((u32, u32), _)| *its_major == major && *its_minor <= minor;
    let best = cubins.into_iter().filter(runs).max_by_key(|(capability, _)| *capability);
    best.map_or(PTX.as_bytes(), |(_, code)| code)
}

#[cfg(test)]
mod tests {
    use xxhash_rust::xxh3::xxh3_128;

    use super::*;

    fn digest(bytes: &[u8]) -> String {
        format!("{:032x}", xxh3_128(bytes))
    }

    #[test]
    fn the_kernel_was_compiled_from_this_source() {
        let made_from: serde_json::Value =
            serde_json::from_str(include_str!("../kernels/copy.json")).unwrap();
        let source = include_bytes!("../kernels/copy.cu");
        let advice = "run scripts/build_kernels.py";
        assert_eq!(made_from["source_xxh3_128"], digest(source), "{advice}");
        let ptx = PTX.strip_suffix('\0').unwrap().as_bytes();
        let made = [
            ("copy.sm_80.cubin", &SM_80.0),
            ("copy.sm_90.cubin", &SM_90.0),
            ("copy.sm_100.cubin", &SM_100.0),
            ("copy.ptx", ptx),
        ];
        for (name, bytes) in made {
            assert_eq!(made_from["xxh3_128"][name], digest(bytes), "{name}: {advice}");
        }
    }

    #[test]
    fn a_driver_of_cuda_12_8_reads_it() {
        // The PTX version of CUDA 12.8, and the oldest supported architecture.
        assert!(PTX.contains(".version 8.7\n") && PTX.contains(".target sm_80\n"));
        for code in [&SM_80.0, &SM_90.0, &SM_100.0] {
            assert!(code.starts_with(b"\x7fELF") && code.as_ptr().addr().is_multiple_of(16));
        }
    }

    #[test]
    fn a_device_gets_machine_code_of_its_major_number_or_ptx() {
        let chosen = |major, minor| image((major, minor)).as_ptr();
        for (capability, code) in [
            ((8, 0), &SM_80.0),
            ((8, 6), &SM_80.0),
            ((8, 9), &SM_80.0),
            ((9, 0), &SM_90.0),
            ((10, 0), &SM_100.0),
            ((10, 3), &SM_100.0),
        ] {
            assert_eq!(chosen(capability.0, capability.1), code.as_ptr(), "{capability:?}");
        }
        for (major, minor) in [(7, 5), (11, 0), (12, 0), (12, 1)] {
            assert_eq!(chosen(major, minor), PTX.as_ptr(), "{major}.{minor}");
        }
    }

    #[test]
    fn the_kernel_expects_the_table_and_the_block_that_we_give_it() {
        let source = include_str!("../kernels/copy.cu");
        assert!(source.contains(&format!("kThreads = {};", super::THREADS)));
        assert!(source.contains(&format!("{}(", super::NAME.to_str().unwrap())));
        assert_eq!(size_of::<crate::driver::TableEntry>(), 24);
        assert!(source.contains("static_assert(sizeof(Entry) == 24"));
    }
}
