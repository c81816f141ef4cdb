/* Entry points of Level Zero that the SYCL runtime of oneAPI 2024.2 looks up and the loader of Debian 12 (1.8) lacks.
   Preloaded; the signatures and the result codes are those of the Level Zero specification. */

typedef unsigned int result;
enum { SUCCESS = 0, UNSUPPORTED = 0x78000003 };

/* A device is its own root: null says so. */
result zeDeviceGetRootDevice(void *device, void **root) {
    *root = (void *)0;
    return SUCCESS;
}

/* Looked up, never called here: for immediate command lists and for views of images. */
result zeCommandListHostSynchronize(void *list, unsigned long long timeout) { return UNSUPPORTED; }
result zeImageViewCreateExt(void *context, void *device, const void *description, void *image, void **view) {
    return UNSUPPORTED;
}
